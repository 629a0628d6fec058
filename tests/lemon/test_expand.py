from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.layers import SwiGLU
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
)

from lightning_methods.lemon import (
    PreLNBertForMaskedLM,
    build_bert,
    expand_bert,
    expand_model,
    expand_resnet,
    expand_vit,
    load_expanded,
    load_source,
    max_output_difference,
    norm_eps,
    save_expanded,
    set_norm_eps,
)
from lightning_methods.lemon.resnet import stage_map
from tests.lemon.networks import bert, images, resnet, tokens, vit

EXACT = 1e-10


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def assert_unchanged(network: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# ViT

VITS = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "layer_scale": {"init_values": 0.1},
    "fc_norm": {"class_token": False, "global_pool": "avg"},
    "no_qkv_bias": {"qkv_bias": False},
    "no_norm": {"final_norm": False},
    "features": {"num_classes": 0},
    "rms": {"norm_layer": "rmsnorm", "init_values": 0.1},
}


@pytest.mark.parametrize("options", VITS.values(), ids=VITS)
@pytest.mark.parametrize("new_block", ["cancel", "zero"])
def test_a_vit_of_another_width_and_depth_computes_the_same(options, new_block):
    # 24 to 40: neither width nor heads are multiples, and with 3 to 5 blocks two are new.
    source, target = vit(24, 3, 3, **options), vit(40, 5, 5, seed=1, **options)
    before, random = state(source), max_output_difference(source, target, images())
    assert random > 1e-2
    assert expand_vit(source, target, new_block=new_block) is target
    assert max_output_difference(source, target, images()) < EXACT
    assert_unchanged(source, before)


@pytest.mark.parametrize("split", ["projection", "complement", "even"])
@pytest.mark.parametrize("depth_mode", ["interpolate", "stack"])
def test_every_split_and_order_of_blocks_is_lossless(split, depth_mode):
    source, target = vit(16, 2, 2), vit(40, 5, 5, seed=1)
    expand_vit(source, target, split=split, depth_mode=depth_mode, free_scale=0.1)
    assert max_output_difference(source, target, images()) < EXACT


def test_a_vit_in_float32():
    source, target = vit(24, 3, 3).float(), vit(40, 5, 5, seed=1).float()
    expand_vit(source, target)
    assert max_output_difference(source, target, images().float()) < 1e-5


def test_half_precision_is_expanded_in_float32_and_cast():
    source, target = vit(16, 1, 2).bfloat16(), vit(24, 1, 3, seed=1).bfloat16()
    exact = copy.deepcopy(target).float()
    expand_vit(copy.deepcopy(source).float(), exact, generator=torch.Generator().manual_seed(0))
    expand_vit(source, target, generator=torch.Generator().manual_seed(0))
    for (name, mine), wide in zip(target.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(mine, wide.bfloat16()), name


def test_a_norm_on_the_stream_needs_a_multiple():
    for options in ({"pre_norm": True}, {"qk_norm": True}, {"scale_attn_norm": True}, {"scale_mlp_norm": True}):
        source, target = vit(16, 1, 2, **options), vit(32, 2, 4, seed=1, **options)
        expand_vit(source, target)
        assert max_output_difference(source, target, images()) < EXACT
        with pytest.raises(ValueError, match="multiples of"):
            expand_vit(source, vit(24, 1, 3, **options))


def test_the_residue_of_the_stream_is_the_mean_and_that_of_norms_is_zero():
    source, target = vit(24, 2, 3), vit(40, 3, 5, seed=1)
    expand_vit(source, target)
    found = {}
    target.blocks[1].norm2.register_forward_hook(
        lambda _, inputs, output: found.update(stream=inputs[0], normed=output)
    )
    with torch.no_grad():
        target(images())
    mean = found["stream"][..., :24].mean(dim=-1, keepdim=True)
    torch.testing.assert_close(found["stream"][..., 24:], mean.expand(-1, -1, 16), rtol=0, atol=1e-12)
    residue = target.blocks[1].norm2.bias[24:]
    assert not residue.any()
    assert found["normed"][..., 24:].abs().max() < 1e-10
    assert found["normed"][..., :24].abs().max() > 0.1


def test_new_blocks_are_the_identity_and_cancelling_ones_have_weights():
    for new_block in ("cancel", "zero"):
        source, target = vit(16, 1, 2), vit(32, 2, 4, seed=1)
        expand_vit(source, target, new_block=new_block)
        found = []
        target.blocks[1].register_forward_hook(lambda _, inputs, output, found=found: found.append((inputs[0], output)))
        with torch.no_grad():
            target(images())
        torch.testing.assert_close(found[0][1], found[0][0], rtol=0, atol=1e-12)
        assert (target.blocks[1].mlp.fc2.weight.abs().max() > 1e-3) == (new_block == "cancel")
        assert target.blocks[1].mlp.fc1.weight.abs().max() > 1e-3


def test_new_blocks_from_the_next_block():
    source, target = vit(16, 2, 2), vit(24, 4, 3, seed=1)
    expand_vit(source, target, new_block="zero", new_block_init="aki")
    assert max_output_difference(source, target, images()) < EXACT
    hidden = source.blocks[0].mlp.fc1.out_features
    rows = target.blocks[1].mlp.fc1.bias[hidden:]  # of the copy of block 0: continued by block 1
    assert torch.equal(rows, source.blocks[1].mlp.fc1.bias[: len(rows)])
    assert torch.equal(target.blocks[0].mlp.fc1.bias[hidden:], source.blocks[0].mlp.fc1.bias[: len(rows)])
    with pytest.raises(ValueError, match="new_block='zero'"):
        expand_vit(source, vit(24, 4, 3), new_block="cancel", new_block_init="aki")


def test_distilled_networks():
    small, large = (
        timm.create_model(
            "deit_tiny_distilled_patch16_224", img_size=32, num_classes=3, embed_dim=w, depth=d, num_heads=h
        )
        for w, d, h in ((16, 1, 2), (24, 2, 3))
    )
    expand_vit(small, large)
    for network in (small, large):
        network.set_distilled_training(True)
    x = torch.randn(2, 3, 32, 32)
    for old, new in zip(small.train()(x), large.train()(x), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-5)


def test_wrappers_are_looked_into():
    source, target = vit(16, 1, 2), vit(24, 1, 3, seed=1)
    averaged = torch.optim.swa_utils.AveragedModel(source)
    parallel = nn.DataParallel(target)
    assert expand_vit(averaged, parallel) is parallel
    assert max_output_difference(source, target, images()) < EXACT


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((8, 2, 1), {}, "embed_dim"),
        ((24, 1, 3), {}, "depth"),
        ((24, 2, 2), {}, "head size"),
        ((24, 2, 3), {"num_classes": 6}, "num_classes"),
        ((24, 2, 3), {"patch_size": 2}, "patch_size"),
        ((24, 2, 3), {"img_size": 16}, "img_size"),
        ((24, 2, 3), {"in_chans": 3}, "in_chans"),
        ((24, 2, 3), {"reg_tokens": 1}, "reg_token"),
        ((24, 2, 3), {"mlp_ratio": 1.0}, "hidden units"),
        ((24, 2, 3), {"pre_norm": True}, "Identity|normalisation|norm_pre|bias"),
        ((24, 2, 3), {"norm_layer": "rmsnorm"}, "normalisation"),
        ((24, 2, 3), {"qkv_bias": False}, "bias"),
        ((24, 2, 3), {"act_layer": "relu"}, "activation"),
        ((24, 2, 3), {"class_token": False, "global_pool": "avg"}, "global_pool"),
    ],
)
def test_vits_that_do_not_fit(sizes, options, words):
    with pytest.raises(ValueError, match=words):
        expand_vit(vit(16, 2, 2), vit(*sizes, **options))


@pytest.mark.bad_input
def test_what_cannot_be_expanded():
    with pytest.raises(ValueError, match="attention"):
        expand_vit(*(vit(w, 1, h, class_token=False, global_pool="map") for w, h in ((16, 2), (32, 4))))
    with pytest.raises(ValueError, match="Mlp"):
        expand_vit(*(vit(w, 1, h, mlp_layer=SwiGLU) for w, h in ((16, 2), (32, 4))))
    with pytest.raises(ValueError, match="new_block"):
        expand_vit(vit(16, 1, 2), vit(24, 1, 3), new_block="half")
    with pytest.raises(ValueError, match="split"):
        expand_vit(vit(16, 1, 2), vit(24, 1, 3), split="odd")
    with pytest.raises(ValueError, match="meta"):
        expand_vit(vit(16, 1, 2), vit(24, 1, 3).to("meta"))
    with pytest.raises(TypeError, match="cannot be expanded"):
        expand_model(nn.Linear(2, 2), nn.Linear(3, 3))


# BERT

POST = [BertModel, BertForMaskedLM, BertForSequenceClassification, BertForPreTraining, BertForQuestionAnswering]


@pytest.mark.parametrize("kind", POST, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("new_block", ["zero", "cancel"])
def test_a_post_norm_bert_grows_to_multiples(kind, new_block):
    # Three blocks out of two: only one is doubled; the hidden units are no multiple.
    source, target = bert(kind, 8, 2, 2), bert(kind, 24, 3, 6, seed=1, intermediate_size=50)
    before = state(source)
    assert max_output_difference(source, target, tokens()) > 1e-2
    expand_bert(source, target, new_block=new_block)
    assert max_output_difference(source, target, tokens()) < 1e-9  # a second LayerNorm errs by its eps
    assert_unchanged(source, before)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [BertForMaskedLM, PreLNBertForMaskedLM])
def test_the_decoder_stays_tied_or_not(kind, tied):
    source, target = (bert(kind, *size, tie_word_embeddings=tied) for size in ((8, 1, 2), (24, 2, 6)))
    expand_bert(source, target)
    assert (target.get_output_embeddings().weight is target.get_input_embeddings().weight) == tied
    assert max_output_difference(source, target, tokens()) < 1e-9


def test_three_copies_of_a_post_norm_block():
    source, target = bert(BertModel, 8, 1, 2), bert(BertModel, 8, 3, 2, seed=1)
    expand_bert(source, target)
    assert max_output_difference(source, target, tokens()) < 1e-9
    norms = [layer.output.LayerNorm for layer in target.encoder.layer]
    for norm in norms[:2]:
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
    assert torch.equal(norms[2].weight, source.encoder.layer[0].output.LayerNorm.weight)


@pytest.mark.parametrize("depth_mode", ["interpolate", "stack"])
@pytest.mark.parametrize("new_block", ["zero", "cancel"])
def test_a_pre_norm_bert_grows_to_any_size(depth_mode, new_block):
    source = bert(PreLNBertForMaskedLM, 8, 2, 2)
    target = bert(PreLNBertForMaskedLM, 20, 5, 5, seed=1, intermediate_size=37)
    expand_bert(source, target, depth_mode=depth_mode, new_block=new_block)
    assert max_output_difference(source, target, tokens()) < EXACT


def test_a_pre_norm_bert_masks_padding_and_gives_its_loss():
    model, batch = bert(PreLNBertForMaskedLM, 8, 2, 2), tokens()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][1, 4:] = 3
    first, second = (model(**inputs).logits for inputs in (batch, changed))
    torch.testing.assert_close(first[1, :4], second[1, :4], rtol=0, atol=0)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 2] = 5
    loss = model(**batch, labels=labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(first[0, 2].float(), torch.tensor(5)))


def test_the_authors_recipe_for_bert():
    source, target = bert(PreLNBertForMaskedLM, 8, 2, 2), bert(PreLNBertForMaskedLM, 16, 4, 4, seed=1)
    expand_bert(source, target, split="complement", free_scale=0.1, new_block_init="aki")
    assert max_output_difference(source, target, tokens()) < EXACT


def test_a_saved_model_keeps_its_function(tmp_path):
    # eps is no part of the weights: the configuration has to carry it. A large one makes it matter.
    source = bert(PreLNBertForMaskedLM, 8, 1, 2, layer_norm_eps=0.1)
    target = bert(PreLNBertForMaskedLM, 20, 2, 5, seed=1)
    expand_bert(source, target)
    target.save_pretrained(tmp_path)
    again = PreLNBertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert max_output_difference(source, again, tokens()) < EXACT
    assert again.decoder.weight is again.embeddings.word_embeddings.weight
    set_norm_eps(again, dict.fromkeys(norm_eps(again), 0.1))
    assert max_output_difference(source, again, tokens()) > 1e-4


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        ((20, 2, 5), {}, "multiples of its hidden size 8"),
        ((4, 2, 1), {}, "hidden_size"),
        ((16, 1, 4), {}, "num_hidden_layers"),
        ((16, 2, 2), {}, "head size"),
        ((16, 2, 4), {"vocab_size": 21}, "vocab_size"),
        ((16, 2, 4), {"max_position_embeddings": 12}, "max_position_embeddings"),
        ((16, 2, 4), {"type_vocab_size": 3}, "type_vocab_size"),
        ((16, 2, 4), {"hidden_act": "relu"}, "hidden_act"),
        ((16, 2, 4), {"intermediate_size": 8}, "intermediate_size"),
        ((16, 2, 4), {"num_labels": 3}, "labels"),
    ],
)
def test_berts_that_do_not_fit(size, options, words):
    kind = BertForSequenceClassification
    with pytest.raises(ValueError, match=words):
        expand_bert(bert(kind, 8, 2, 2), bert(kind, *size, **options))


@pytest.mark.bad_input
def test_more_of_bert_that_does_not_fit():
    with pytest.raises(ValueError, match="stack"):
        expand_bert(bert(BertModel, 8, 1, 2), bert(BertModel, 8, 2, 2), depth_mode="stack")
    with pytest.raises(ValueError, match="tied"):
        expand_bert(bert(BertForMaskedLM, 8, 1, 2, tie_word_embeddings=False), bert(BertForMaskedLM, 16, 1, 4))
    with pytest.raises(ValueError, match="class"):
        expand_bert(bert(BertModel, 8, 1, 2), bert(BertForMaskedLM, 8, 1, 2))
    with pytest.raises(ValueError, match="num_attention_heads"):
        build_bert(10, 1, 3)


# ResNet


@pytest.mark.parametrize("depth_mode", ["interpolate", "stack"])
def test_a_resnet_grows_in_width_and_depth(depth_mode):
    # New blocks behind a stage's first block, with and without a second one to copy.
    source = resnet(Bottleneck, [1, 2, 1, 1], width_per_group=16)
    target = resnet(Bottleneck, [2, 4, 1, 2], seed=1, width_per_group=40)
    before = state(source)
    assert max_output_difference(source, target, images(3, 32)) > 1e-2
    expand_resnet(source, target, depth_mode=depth_mode)
    assert max_output_difference(source, target, images(3, 32)) < EXACT
    assert_unchanged(source, before)


def test_a_resnet_of_basic_blocks_grows_everywhere():
    source = resnet(BasicBlock, [1, 1, 1, 1])
    target = resnet(BasicBlock, [2, 1, 1, 2], seed=1)
    expand_resnet(source, target)
    assert max_output_difference(source, target, images(3, 32)) < EXACT


def test_stages_of_a_resnet():
    assert stage_map(2, 4, "interpolate") == [(0, False), (0, True), (1, False), (1, True)]
    assert stage_map(3, 4, "interpolate") == [(0, False), (0, True), (1, False), (2, False)]
    assert stage_map(2, 3, "stack") == [(0, False), (1, False), (0, True)]


@pytest.mark.bad_input
def test_resnets_that_do_not_fit():
    source = resnet(Bottleneck, [1, 1, 1, 1], width_per_group=16)
    for target, words in (
        (resnet(BasicBlock, [1, 1, 1, 1]), "kind of block"),
        (resnet(Bottleneck, [1, 1, 1, 1], width_per_group=8), "channels"),
        (resnet(Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=16), "groups"),
    ):
        with pytest.raises(ValueError, match=words):
            expand_resnet(source, target)
    with pytest.raises(ValueError, match="number of blocks"):
        expand_resnet(resnet(Bottleneck, [1, 2, 1, 1], width_per_group=16), source)
    with pytest.raises(ValueError, match="aki"):
        expand_model(source, source, "aki")


# baselines


def test_what_is_lossless_and_what_is_not():
    for method, lossless in (("lemon", True), ("fpi", True), ("aki", False), ("stack", False)):
        source, target = vit(16, 2, 2), vit(24, 3, 3, seed=1)
        expand_model(source, target, method)
        difference = max_output_difference(source, target, images())
        assert difference < EXACT if lossless else difference > 1e-3
    target = vit(24, 3, 3, seed=1)
    before = state(target)
    assert expand_model(vit(16, 2, 2), target, "scratch") is target
    assert_unchanged(target, before)


def test_lossless_baselines_of_width_at_multiples():
    # Without new blocks StackBERT is its width expansion, which is lossless at multiples.
    source, target = vit(16, 2, 2), vit(32, 2, 4, seed=1)
    expand_model(source, target, "stack")
    assert max_output_difference(source, target, images()) < EXACT


def test_aki_takes_rows_of_the_next_block():
    source, target = bert(BertForMaskedLM, 8, 2, 2), bert(BertForMaskedLM, 16, 2, 4, seed=1)
    expand_model(source, target, "aki")
    first, second = (layer.intermediate.dense for layer in source.bert.encoder.layer)
    grown = [layer.intermediate.dense.bias for layer in target.bert.encoder.layer]
    assert torch.equal(grown[0], torch.cat([first.bias, second.bias]))
    assert torch.equal(grown[1], torch.cat([second.bias, second.bias]))  # the last block has no next one
    assert max_output_difference(source, target, tokens()) > 1e-4


def test_stacked_blocks_are_plain_copies():
    source, target = resnet(BasicBlock, [1, 2, 1, 1]), resnet(BasicBlock, [1, 4, 1, 1], seed=1)
    expand_model(source, target, "stack")
    assert torch.equal(target.layer2[3].conv1.weight, source.layer2[1].conv1.weight)
    assert max_output_difference(source, target, images(3, 32)) > 1e-3


def train(split: str) -> nn.Module:
    source, target = vit(12, 2, 2, num_classes=4), vit(24, 2, 4, seed=1, num_classes=4)
    expand_vit(source, target, split=split)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (32,), generator=generator)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(target(x), y).backward()
        optimizer.step()
    return target


def test_an_even_split_never_breaks_the_symmetry_and_a_projection_does():
    for split in ("even", "projection"):
        mlp = train(split).blocks[0].mlp
        hidden = mlp.fc1.out_features // 2
        rows = (mlp.fc1.weight[:hidden] - mlp.fc1.weight[hidden:]).abs().max()
        columns = (mlp.fc2.weight[:, :hidden] - mlp.fc2.weight[:, hidden:]).abs().max()
        if split == "even":  # to the last bit
            assert rows == columns == 0
        else:
            assert min(rows, columns) > 0.05


# eps, files, comparison


def test_a_file_keeps_the_function(tmp_path):
    source = vit(16, 1, 2)
    for parameter in (source.cls_token, source.pos_embed, source.patch_embed.proj.weight, source.patch_embed.proj.bias):
        parameter.data *= 1e-3  # a small stream, so that eps matters
    target = vit(24, 1, 3, seed=1)
    expand_vit(source, target)
    save_expanded(target, tmp_path / "big.pt", note="x")
    again = load_expanded(vit(24, 1, 3, seed=2), str(tmp_path / "big.pt"))
    assert max_output_difference(source, again, images()) < EXACT
    plain = vit(24, 1, 3, seed=2)
    plain.load_state_dict(torch.load(tmp_path / "big.pt", weights_only=True)["state_dict"])
    assert max_output_difference(source, plain, images()) > 1e-6  # what the eps is kept for
    with pytest.raises(ValueError, match="no normalisation layer 'norm9'"):
        set_norm_eps(plain, {"norm9": 1.0})


def test_a_network_is_found_in_a_checkpoint(tmp_path):
    source = vit(16, 1, 2)
    torch.save({"state_dict": {f"network.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "run.ckpt")
    torch.save({"model": source.state_dict()}, tmp_path / "deit.pth")
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    for name in ("run.ckpt", "deit.pth", "plain.pt"):
        again = load_source(vit(16, 1, 2, seed=4), tmp_path / name)
        assert max_output_difference(source, again, images()) == 0
    twice = {f"{part}.{k}": v for part in ("a", "b") for k, v in source.state_dict().items()}
    torch.save({"state_dict": twice}, tmp_path / "twice.ckpt")
    with pytest.raises(ValueError, match="prefix"):
        load_source(vit(16, 1, 2), tmp_path / "twice.ckpt")
    load_source(vit(16, 1, 2), tmp_path / "twice.ckpt", "b")
    with pytest.raises(ValueError, match="missing there"):
        load_source(vit(16, 2, 2), tmp_path / "plain.pt")
    with pytest.raises(FileNotFoundError):
        load_source(nn.Linear(2, 3), tmp_path / "nothing.pt")


def test_the_comparison_restores_every_mode_and_refuses_other_shapes():
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)).train()
    network[0].eval()
    assert max_output_difference(network, network, torch.randn(5, 2)) == 0
    assert network.training
    assert network[1].training
    assert not network[0].training
    with pytest.raises(ValueError, match="shapes"):
        max_output_difference(nn.Linear(2, 3), nn.Linear(2, 2), torch.randn(5, 2))
