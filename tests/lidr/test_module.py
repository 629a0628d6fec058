"""What makes the method: reference, gradient, modes, iterations, resuming."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from datamodules import PreferenceDataModule
from lightning_methods.cli import run
from lightning_methods.core import write_jsonl
from lightning_methods.lidr import (
    LIDR,
    MultilingualAlignment,
    PrecomputeReference,
    PreferenceBatch,
    SavePretrained,
    lidr_loss,
    sequence_log_prob,
)
from lightning_methods.lidr.module import response_log_probs
from lightning_methods.text import load_model, save_tiny, tiny_causal_lm, word_tokenizer
from tests.vectors import load_cases

FIELDS = [f"{which}_{name}" for which in ("chosen", "rejected") for name in ("ids", "mask", "labels")]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def tiny(**config):
    return tiny_causal_lm(30, width=16, layers=1, positions=32, initializer_range=0.3, **config)


def batch_of(seed=0, rows=3, language_ids=None):
    generator = torch.Generator().manual_seed(seed)
    fields = {}
    for which, width in (("chosen", 9), ("rejected", 6)):
        ids = torch.randint(7, 30, (rows, width), generator=generator)
        mask = torch.ones_like(ids)
        labels = ids.clone()
        for row in range(rows):
            labels[row, : 1 + row] = -100
            if row:
                ids[row, -row:], mask[row, -row:], labels[row, -row:] = 0, 0, -100
        fields |= {f"{which}_ids": ids, f"{which}_mask": mask, f"{which}_labels": labels}
    return PreferenceBatch(**fields, language_ids=language_ids)


def plain(model, batch, which):
    """Log-probabilities by the whole logits of one answer alone."""
    ids, mask, labels = (getattr(batch, f"{which}_{name}") for name in ("ids", "mask", "labels"))
    return sequence_log_prob(model(input_ids=ids, attention_mask=mask).logits, labels)


def trainer(folder, **options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{**defaults, "default_root_dir": folder, "max_epochs": 1, **options})


# against the vector


def test_case_8_end_to_end():
    case = next(case for case in load_cases("lidr") if case.number == 8)
    vocab, width, positions, layers, heads = case.inputs["config"].tolist()
    networks = []
    for name in ("policy", "reference"):
        config = GPT2Config(vocab_size=vocab, n_embd=width, n_positions=positions, n_layer=layers, n_head=heads)
        network = GPT2LMHeadModel(config).double()
        weights = {k.partition("/")[2]: v for k, v in case.inputs.items() if k.startswith(f"{name}/")}
        missing = network.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"lm_head.weight"}
        networks.append(network)
    module = LIDR(*networks, beta=case.inputs["beta"], alpha=case.inputs["alpha"])
    batch = PreferenceBatch(**{name: case.inputs[name] for name in FIELDS})
    out = module.losses(batch)
    expected = case.outputs
    for value, name in ((out.loss, "loss"), (out.dpo.mean(), "dpo"), (out.nll.mean(), "nll")):
        torch.testing.assert_close(value.item(), expected[name], rtol=1e-7, atol=0)
    torch.testing.assert_close(module.log_probs(module.model, batch)[0], expected["policy_chosen"], rtol=1e-7, atol=0)
    torch.testing.assert_close(module.reference_log_probs(batch)[1], expected["reference_rejected"], rtol=1e-7, atol=0)


# the log-probabilities


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_only_answers_reach_the_head_and_the_result_is_that_of_the_whole_logits(architecture, chunk_size):
    module = LIDR(tiny(architecture=architecture), chunk_size=chunk_size)
    batch = batch_of()
    seen = []
    module.model.get_output_embeddings().register_forward_hook(lambda m, a, out: seen.append(out.shape))
    chosen, rejected, length = module.log_probs(module.model, batch)
    scored = sum((getattr(batch, f"{which}_labels")[:, 1:] != -100).sum().item() for which in ("chosen", "rejected"))
    assert seen == [torch.Size([1, scored, 30])]
    for value, which in ((chosen, "chosen"), (rejected, "rejected")):
        torch.testing.assert_close(value, plain(module.model, batch, which)[0])
    assert torch.equal(length, plain(module.model, batch, "chosen")[1])


def test_padding_on_the_left_changes_nothing():
    module = LIDR(tiny())
    batch = batch_of()
    fields = batch._asdict()
    for name in FIELDS:
        width = (0 if "labels" not in name else -100, 4)
        fields[name] = nn.functional.pad(fields[name], (4, 0), value=width[0])
    torch.testing.assert_close(
        module.log_probs(module.model, PreferenceBatch(**fields)), module.log_probs(module.model, batch)
    )


class Bare(nn.Module):
    """A model that is not from transformers and returns logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) * attention_mask[..., None]
        return self.head(x.cumsum(dim=1))


def test_any_module_that_returns_logits_will_do():
    model, batch = Bare(), batch_of()
    ids, mask, labels = (getattr(batch, f"chosen_{name}") for name in ("ids", "mask", "labels"))
    expected = sequence_log_prob(model(ids, mask), labels)
    torch.testing.assert_close(response_log_probs(model, ids, mask, labels), expected)
    assert LIDR(Bare())(ids, mask).shape == (3, 9, 30)


# who learns


def test_policy_learns_reference_stays_and_both_are_without_dropout():
    model = tiny(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    module = LIDR(model).train()
    assert module.model is model
    assert module.reference is not model
    assert not module.reference.training
    assert all(m.p == 0 for network in (module.model, module.reference) for m in network.modules()
               if isinstance(m, nn.Dropout))  # fmt: skip
    batch = batch_of()
    torch.testing.assert_close(module.losses(batch).loss, module.losses(batch).loss, rtol=0, atol=0)
    torch.testing.assert_close(module.losses(batch).dpo, torch.full((3,), 2.0).log())
    module.losses(batch).loss.backward()
    assert all(p.grad is not None for p in module.model.parameters())
    assert all(p.grad is None and not p.requires_grad for p in module.reference.parameters())
    optimised = {id(p) for group in module.configure_optimizers().param_groups for p in group["params"]}
    assert optimised == {id(p) for p in module.model.parameters()}


def test_the_defaults_are_those_of_the_method():
    module = LIDR(tiny())
    assert (module.beta, module.alpha, module.lr_interval) == (0.1, 1.0, "step")
    group = module.configure_optimizers().param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (5e-7, 0.0)


def test_the_loss_is_the_formula_on_both_networks():
    torch.manual_seed(0)
    module = LIDR(tiny(), reference=tiny(seed=5), beta=0.3, alpha=0.7)
    batch = batch_of()
    (pw, n), (pl, _) = (plain(module.model, batch, which) for which in ("chosen", "rejected"))
    (rw, _), (rl, _) = (plain(module.reference, batch, which) for which in ("chosen", "rejected"))
    expected = lidr_loss(pw, pl, rw, rl, n, 0.3, 0.7)
    torch.testing.assert_close(tuple(module.losses(batch)), tuple(expected))
    torch.testing.assert_close(module.predict_step(batch, 0), pw - pl)


def test_refresh_makes_the_present_model_the_reference():
    module = LIDR(tiny(), optimizer=adamw)
    optimizer = module.configure_optimizers()
    module.losses(batch_of()).loss.backward()
    optimizer.step()
    assert not torch.allclose(module.losses(batch_of()).dpo, torch.full((3,), 2.0).log())
    module.refresh_reference()
    torch.testing.assert_close(module.losses(batch_of()).dpo, torch.full((3,), 2.0).log())
    assert not any(p.requires_grad for p in module.reference.parameters())
    assert module.checkpoint_excludes == ()  # it is no longer what the arguments give


def test_supervised_baseline_is_the_likelihood_term_alone():
    model = tiny()
    batch = batch_of()
    sft = MultilingualAlignment(copy.deepcopy(model))
    assert sft.reference is None
    log_prob, length = plain(model, batch, "chosen")
    torch.testing.assert_close(sft.losses(batch).loss, (-log_prob / length).mean())
    other = batch._replace(rejected_ids=batch.rejected_ids.flip(1))
    torch.testing.assert_close(sft.losses(other).loss, sft.losses(batch).loss)


# modes of the reference


def test_adapter_off_is_the_model_without_its_adapter():
    pytest.importorskip("peft")
    base = tiny()
    frozen = copy.deepcopy(base)
    module = LIDR(base, reference_mode="adapter_off", lora_rank=2, optimizer=adamw)
    assert module.reference is None
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    batch = batch_of()
    optimizer = module.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        module.losses(batch).loss.backward()
        optimizer.step()
    before = plain(frozen, batch, "chosen")[0]
    torch.testing.assert_close(module.reference_log_probs(batch)[0], before)
    after = module.log_probs(module.model, batch)[0].detach()
    assert not torch.allclose(after, before)
    # Without merging, the reference would still be the first model.
    module.refresh_reference()
    torch.testing.assert_close(module.reference_log_probs(batch)[0], after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.log_probs(module.model, batch)[0], after, rtol=1e-4, atol=1e-4)
    assert all("lora_" in name for name, p in module.named_parameters() if p.requires_grad)


def test_a_copy_with_lora_is_a_copy_of_the_base():
    pytest.importorskip("peft")
    module = LIDR(tiny(), lora_rank=2)
    assert not any("lora_" in name for name, _ in module.reference.named_parameters())
    torch.testing.assert_close(module.losses(batch_of()).dpo, torch.full((3,), 2.0).log())
    module.refresh_reference()
    assert not any("lora_" in name for name, _ in module.reference.named_parameters())


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for switch in (False, True):
        module = LIDR(tiny(), gradient_checkpointing=switch)
        assert module.model.is_gradient_checkpointing == switch
        module.losses(batch_of()).loss.backward()
        gradients.append([p.grad for p in module.model.parameters()])
    torch.testing.assert_close(*gradients)


# fits


def data(**options):
    return PreferenceDataModule(batch_size=32, **options)


def policy(**config):
    return tiny_causal_lm(227, width=16, layers=1, positions=32, **config)


def test_precomputed_equals_copy_and_a_resumed_run_keeps_the_first_model_as_reference(tmp_path):
    kept, precomputed = LIDR(policy(), optimizer=adamw), LIDR(policy(), reference_mode="precomputed", optimizer=adamw)
    one = trainer(tmp_path, max_epochs=2, enable_checkpointing=False)
    one.fit(kept, datamodule=data())
    callbacks = [PrecomputeReference(batch_size=50), ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)]
    two = trainer(tmp_path, max_epochs=1, callbacks=callbacks)
    two.fit(precomputed, datamodule=data())
    assert precomputed.reference is None
    resumed = LIDR(policy(seed=9), reference_mode="precomputed", optimizer=adamw)
    callbacks = [PrecomputeReference(batch_size=50)]
    three = trainer(tmp_path, max_epochs=2, callbacks=callbacks, enable_checkpointing=False)
    three.fit(resumed, datamodule=data(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    for name in ("train/loss", "val/loss", "val/reward_acc"):
        torch.testing.assert_close(three.callback_metrics[name], one.callback_metrics[name], rtol=1e-4, atol=1e-5)
    assert one.callback_metrics["val/reward_acc_en"].isfinite()
    assert one.callback_metrics["val/reward_acc_de"].isfinite()


def test_rewards_by_language_are_means_of_that_language(tmp_path):
    module = LIDR(tiny(), reference=tiny(seed=5), languages=["aa", "b.b"])
    module.setup = lambda stage: None
    batches = [batch_of(seed, 3, torch.tensor([0, 1, 1])) for seed in range(4)]
    loop = trainer(tmp_path, enable_checkpointing=False)
    loop.validate(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
    wins = torch.stack([(out.reward_chosen > out.reward_rejected).float() for out in map(module.losses, batches)])
    measured = loop.callback_metrics
    torch.testing.assert_close(measured["val/reward_acc"], wins.mean())
    torch.testing.assert_close(measured["val/reward_acc_aa"], wins[:, 0].mean())
    torch.testing.assert_close(measured["val/reward_acc_b_b"], wins[:, 1:].mean())


def test_the_trained_model_is_a_folder_with_the_adapter_merged(tmp_path):
    pytest.importorskip("peft")
    module = LIDR(policy(), reference_mode="adapter_off", lora_rank=2, optimizer=adamw)
    callbacks = [SavePretrained(str(tmp_path / "out" / "M1"))]
    loop = trainer(tmp_path, callbacks=callbacks, enable_checkpointing=False, limit_train_batches=2)
    loop.fit(module, datamodule=data())
    saved = load_model(str(tmp_path / "out" / "M1"))
    ids = torch.tensor([[7, 8, 9]])
    assert not torch.allclose(saved(ids).logits, policy()(ids).logits, atol=1e-4)
    torch.testing.assert_close(saved(ids).logits, module(ids), rtol=1e-4, atol=1e-4)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["M1"]


def test_a_checkpoint_of_a_named_model_with_an_adapter_is_small_and_whole(tmp_path):
    pytest.importorskip("peft")
    folder = save_tiny(tmp_path / "M0", words=[f"w{i}" for i in range(19)], width=16, layers=1)
    module = LIDR(folder, reference_mode="adapter_off", lora_rank=2, optimizer=adamw)
    state = {name for name, p in module.model.named_parameters() if p.requires_grad}
    optimizer = module.configure_optimizers()
    module.losses(batch_of()).loss.backward()
    optimizer.step()
    loop = trainer(tmp_path, enable_checkpointing=False)
    loop.strategy.connect(module)
    loop.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert {name.removeprefix("model.") for name in saved} >= state
    assert not any("wte" in name for name in saved)
    again = LIDR.load_from_checkpoint(tmp_path / "x.ckpt")
    torch.testing.assert_close(again.losses(batch_of()).loss, module.losses(batch_of()).loss)


# errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference_mode": "copied"}, "reference_mode must be one of"),
        ({"beta": 0}, "beta"),
        ({"alpha": -1}, "alpha"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"reference_mode": "adapter_off"}, "needs a LoRA adapter"),
        ({"reference_mode": "precomputed", "reference": "x"}, "has no use for one"),
        ({"lr_interval": "year"}, "lr_interval"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LIDR(tiny(), **options)


@pytest.mark.bad_input
def test_bad_batches():
    module, batch = LIDR(tiny()), batch_of()
    with pytest.raises(ValueError, match="chosen_labels must have shape"):
        module.losses(batch._replace(chosen_labels=batch.chosen_labels[:, 1:]))
    with pytest.raises(ValueError, match="same number of rows"):
        module.losses(batch._replace(rejected_ids=batch.rejected_ids[1:]))
    with pytest.raises(ValueError, match="row 4 has none"):
        module.losses(
            batch._replace(
                rejected_labels=torch.full_like(batch.rejected_labels, -100).index_copy_(
                    0, torch.tensor([0, 2]), batch.rejected_labels[[0, 2]]
                )
            )
        )
    precomputed = LIDR(tiny(), reference_mode="precomputed")
    with pytest.raises(ValueError, match="add the callback PrecomputeReference"):
        precomputed.losses(batch)
    with pytest.raises(ValueError, match="reference_chosen must have shape"):
        precomputed.losses(batch._replace(reference_chosen=torch.zeros(2), reference_rejected=torch.zeros(3)))


@pytest.mark.bad_input
def test_the_callback_says_what_it_needs(tmp_path):
    loop = trainer(tmp_path, callbacks=[PrecomputeReference()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="reference_mode='precomputed'"):
        loop.fit(LIDR(policy()), datamodule=data())
    loop = trainer(tmp_path, callbacks=[PrecomputeReference()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="a data module with pairs"):
        loop.fit(
            LIDR(policy(), reference_mode="precomputed"), torch.utils.data.DataLoader([batch_of()], batch_size=None)
        )
    with pytest.raises(ValueError, match="batch_size"):
        PrecomputeReference(0)


# the configurations of the paper's model, on a small one of the same family and files of the same format


@pytest.mark.parametrize("name", ["alpagasus", "alpagasus_lora", "alpagasus_sft", "gsm8k"])
def test_the_papers_configurations_run_on_a_tiny_model(name, tmp_path, monkeypatch):
    if "lora" in name:
        pytest.importorskip("peft")
    monkeypatch.chdir(Path(__file__).parents[2])
    words = [f"w{i}" for i in range(30)]
    tokenizer = word_tokenizer([*words, "You", "are", "a", "helpful", "assistant."])
    tokenizer.save_pretrained(tmp_path / "M0")
    tiny_causal_lm(tokenizer, width=16, layers=1, architecture="llama").save_pretrained(tmp_path / "M0")
    rows = [
        {"id": str(i), "language": "es" if i % 2 else "en", "prompt": f"w{i}", "chosen": "w1 w2", "rejected": "w3"}
        for i in range(30)
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    cli = run(
        [
            "fit", "--config", f"configs/lidr/{name}.yaml", "--config", "configs/trainer/cpu.yaml",
            f"--model.init_args.model={tmp_path / 'M0'}", f"--data.init_args.path={tmp_path / 'pairs.jsonl'}",
            f"--data.init_args.tokenizer={tmp_path / 'M0'}", "--data.init_args.val_fraction=0.2",
            "--trainer.strategy=auto", "--trainer.precision=32-true", "--trainer.limit_train_batches=2",
            f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
        ]
    )  # fmt: skip
    assert cli.trainer.global_step > 0
    assert torch.isfinite(torch.tensor(cli.test_metrics["test/loss"]))
