from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_methods.memory_mosaics import (
    GPTLM,
    ContextualMemory,
    MemoryMosaicBlock,
    MemoryMosaicLM,
    PersistentMemory,
    ThreeMoonsMosaic,
)


def language_model(**options) -> MemoryMosaicLM:
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "num_heads": 3, "num_layers": 2, "memory_size": 5, "attn_dropout": 0, "resid_dropout": 0}
    return MemoryMosaicLM(17, **{**sizes, **options}).double().eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(seed))


# causality


@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("pre_ln", [True, False])
def test_the_future_changes_nothing(shift, pre_ln):
    model = language_model(shift=shift, pre_ln=pre_ln)
    ids = tokens(2, 80)
    other = ids.clone()
    other[:, 40:] = tokens(2, 40, seed=1)
    with torch.no_grad():
        before, after = model(ids), model(other)
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-12)
    assert (before[:, 40] - after[:, 40]).abs().max() > 1e-6


def test_the_contextual_memory_uses_the_present_as_value_of_the_past():
    """The pair (k_{t-1}, v_{t-1}) is complete at time t: the output at t depends on x_t through it."""
    torch.manual_seed(0)
    memory = ContextualMemory(4, 1).double()
    torch.nn.init.zeros_(memory.value_mix)  # v_t is a function of x_{t+1} alone
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    value = F.normalize(memory.value_proj(x)[:, 1], dim=1) * math.exp(-0.5)
    torch.testing.assert_close(memory(x)[:, 1], memory.out_proj(value))


# the cache


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("parts", [[70], [1] * 9, [2, 65, 1, 4], [1, 1, 1, 30]])
def test_a_cache_gives_the_logits_of_the_whole_text(shift, parts):
    model = language_model(shift=shift)
    ids = tokens(2, sum(parts))
    cache = model.start_cache()
    with torch.no_grad():
        found = torch.cat([model(part, cache) for part in ids.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(found, model(ids))


def test_generation_with_the_cache_is_generation_without():
    model = language_model()
    ids = tokens(3, 5)
    found = model.generate(ids, 20, temperature=0)
    text = ids
    with torch.no_grad():
        for _ in range(20):
            text = torch.cat([text, model(text)[:, -1:].argmax(dim=2)], dim=1)
    assert found.shape == (3, 25)
    assert (found == text).all()


def test_draws_of_generation():
    model = language_model().train()
    ids = tokens(1, 4).expand(300, -1)
    generator = torch.Generator().manual_seed(0)
    found = model.generate(ids, 1, temperature=0.7, top_k=3, generator=generator)[:, -1]
    assert model.training
    with torch.no_grad():
        logits = model.eval()(ids[:1])[0, -1] / 0.7
    best = logits.topk(3)
    shares = torch.stack([(found == token).double().mean() for token in best.indices])
    assert float(shares.sum()) == 1
    torch.testing.assert_close(shares, best.values.softmax(dim=0), rtol=0, atol=0.1)


def test_a_text_ends_with_its_last_token():
    model = language_model()
    ids = tokens(4, 3)
    free = model.generate(ids, 12, temperature=0)
    end = int(free[0, 5])
    found = model.generate(ids, 12, temperature=0, eos_token_id=end)
    for row, text in zip(found, free, strict=True):
        new = text[3:].tolist()
        stop = new.index(end) + 1 if end in new else len(new)
        assert row[3 : 3 + stop].tolist() == new[: min(stop, len(row) - 3)]
        assert (row[3 + stop :] == end).all()


def test_gpt_looks_at_its_last_tokens():
    torch.manual_seed(0)
    model = GPTLM(17, embed_dim=8, num_heads=2, num_layers=1, block_size=6).eval()
    long = tokens(1, 15)
    assert (
        model.generate(long, 1, temperature=0)[:, -1] == model.generate(long[:, -6:], 1, temperature=0)[:, -1]
    ).all()
    with pytest.raises(ValueError, match="block_size"):
        model(long)


def test_gpt_is_causal():
    torch.manual_seed(0)
    model = GPTLM(17, embed_dim=8, num_heads=2, num_layers=2, block_size=20).double().eval()
    ids = tokens(1, 20)
    other = ids.clone()
    other[:, 10:] = tokens(1, 10, seed=3)
    torch.testing.assert_close(model(ids)[:, :10], model(other)[:, :10], rtol=0, atol=1e-12)


# initial state, parameters, precision


def test_a_new_model_knows_nothing():
    torch.manual_seed(0)
    model = MemoryMosaicLM(1000, embed_dim=64, num_heads=4, num_layers=2, memory_size=32)
    ids = torch.randint(1000, (4, 32))
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(1000), abs=0.02)


def test_initial_values():
    torch.manual_seed(0)
    model = MemoryMosaicLM(50, embed_dim=64, num_heads=4, num_layers=4, memory_size=300)
    memory, pairs = model.blocks[0].contextual, model.blocks[0].persistent
    torch.testing.assert_close(10 * memory.key_decay.detach(), torch.linspace(0.5, 5, 4))
    assert (10 * memory.key_scale == 1).all()
    assert torch.allclose(10 * memory.value_scale, torch.tensor(-0.5))
    assert ((memory.value_mix >= 0) & (memory.value_mix < 1)).all()
    assert float(memory.key_proj.weight.std()) == pytest.approx(1 / 8, rel=0.1)
    assert float(memory.out_proj.weight.std()) == pytest.approx(1 / 16, rel=0.1)
    assert float(pairs.mem_keys.std()) == pytest.approx(1 / 4, rel=0.1)
    assert float(model.embed.weight.std()) == pytest.approx(1 / 8, rel=0.1)
    free = MemoryMosaicLM(50, 64, 4, 4, 300, tie_weights=False)
    assert float(free.embed.weight.std()) == pytest.approx(1, rel=0.1)
    assert float(free.head.weight.std()) == pytest.approx(1 / 8, rel=0.1)
    assert model.head.weight is model.embed.weight
    small = MemoryMosaicLM(50, 64, 4, 4, 300, init="gpt2", tie_weights=False)
    assert float(small.blocks[0].contextual.out_proj.weight.std()) == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert float(small.head.weight.std()) == pytest.approx(0.02, rel=0.1)
    assert small.head.weight is not small.embed.weight
    assert small.logit_scale == 1


def test_a_block_has_the_parameters_of_a_gpt_block():
    block = MemoryMosaicBlock(64, 4, memory_size=round(3.5 * 64))
    matrices = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    assert matrices == 12 * 64**2


def test_without_persistent_memories():
    model = language_model(memory_size=0)
    assert model.blocks[0].persistent is None
    assert model(tokens(1, 4)).shape == (1, 4, 17)


def test_the_sign_of_a_decay_does_not_matter_and_scales_are_clamped():
    torch.manual_seed(0)
    memory = PersistentMemory(8, 2, 6).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    before = memory(x)
    memory.key_decay.data.neg_()
    torch.testing.assert_close(memory(x), before)
    memory.key_scale.data.fill_(0.6)  # beyond the clamp at 5 / 10
    beyond = memory(x)
    memory.key_scale.data.fill_(0.5)
    torch.testing.assert_close(memory(x), beyond)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = language_model().float()
    ids = tokens(2, 70)
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    whole = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(float(whole), rel=0.05)


def test_dropout_only_in_training():
    model = language_model(attn_dropout=0.5, resid_dropout=0.5)
    ids = tokens(1, 20)
    assert (model(ids) == model(ids)).all()
    model.train()
    assert (model(ids) != model(ids)).any()


# three moons


@pytest.mark.parametrize("num_heads", [1, 3])
def test_three_moons_layer_is_the_formula(num_heads):
    torch.manual_seed(0)
    model = ThreeMoonsMosaic(num_heads, 6 // num_heads).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    k = (x @ model.key_proj.weight.T).unflatten(2, (num_heads, -1))
    w = (x @ model.value_proj.weight.T).unflatten(2, (num_heads, -1))
    rows = [torch.zeros(2, 6, dtype=torch.float64)]
    for t in range(1, 9):
        weights = (50 * torch.einsum("bhd,bshd->bhs", k[:, t], k[:, :t])).softmax(dim=2)
        rows.append(torch.einsum("bhs,bshd->bhd", weights, w[:, 1 : t + 1]).flatten(1))
    expected = torch.stack(rows, dim=1) @ model.out_proj.weight.T
    torch.testing.assert_close(model(x), expected)
    assert model.generate(x, 3).shape == (2, 12, 6)


def test_three_moons_weights_stay_complex_linear():
    torch.manual_seed(0)
    model = ThreeMoonsMosaic(3, 2)
    model.key_proj.weight.data += torch.randn(6, 6)
    a, b, c, d = (model.effective_weight(model.key_proj)[i::2, j::2] for i in (0, 1) for j in (0, 1))
    torch.testing.assert_close(a, d)
    torch.testing.assert_close(b, -c)
    free = ThreeMoonsMosaic(3, 2, complex_linear=False)
    assert free.effective_weight(free.key_proj) is free.key_proj.weight


# errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ContextualMemory(10, 3), "multiple of num_heads"),
        (lambda: ContextualMemory(10, 2, shift=0), "shift"),
        (lambda: PersistentMemory(10, 2, 0), "memory_size"),
        (lambda: MemoryMosaicLM(10, 8, 2, 1, -1), "memory_size"),
        (lambda: MemoryMosaicLM(10, 8, 2, 1, 4, init="zeros"), "init"),
        (lambda: GPTLM(10, 9, 2), "multiple of num_heads"),
        (lambda: ContextualMemory(4, 2)(torch.zeros(1, 0, 4)), "time >= 1"),
        (lambda: language_model().generate(torch.zeros(1, 0, dtype=torch.long), 2), "time >= 1"),
        (lambda: language_model().generate(tokens(1, 3), 2, temperature=-1), "temperature"),
        (lambda: language_model().generate(tokens(1, 3), 2, top_k=0), "top_k"),
        (lambda: ThreeMoonsMosaic(1, 3), "even"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
