from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock
from transformers import BertForMaskedLM

from lightning_methods.lemon import PreLNBertForMaskedLM, load_expanded, max_output_difference
from lightning_methods.lemon.__main__ import main
from lightning_methods.text import load_tokenizer, save_tiny
from tests.lemon.networks import bert, images, tokens

SMALL = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 5, "embed_dim": 16, "depth": 1, "num_heads": 2}


def small_vit(path: Path) -> torch.nn.Module:
    network = timm.create_model("vit_tiny_patch16_224", **SMALL)
    torch.save(network.state_dict(), path)
    return network


def test_help_takes_no_torch():
    code = (
        "import sys; from lightning_methods.lemon.__main__ import _parser; _parser().format_help();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(SystemExit) as stop:
        main(["expand", "--help"])
    assert stop.value.code == 0


def test_a_folder_of_transformers_becomes_another(tmp_path, capsys):
    source = save_tiny(tmp_path / "small", kind="masked", width=8, layers=2, heads=2)
    assert main(["expand", source, str(tmp_path / "big"), "--hidden-size", "16", "--num-layers", "3"]) == 0
    assert "million parameters" in capsys.readouterr().out
    small, big = (BertForMaskedLM.from_pretrained(folder).eval() for folder in (source, tmp_path / "big"))
    config = big.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 3, 4)
    assert config.intermediate_size == 2 * small.config.intermediate_size
    batch = load_tokenizer(str(tmp_path / "big"))(["a b c", "d"], padding=True, return_tensors="pt")
    assert max_output_difference(small, big, {key: batch[key] for key in ("input_ids", "attention_mask")}) < 1e-5


def test_a_pre_norm_folder_at_an_indivisible_width(tmp_path):
    small = bert(PreLNBertForMaskedLM, 8, 1, 2).float()
    small.save_pretrained(tmp_path / "small")
    arguments = ["--hidden-size", "20", "--intermediate-size", "33", "--split", "complement", "--free-scale", "0.1"]
    main(["expand", str(tmp_path / "small"), str(tmp_path / "big"), *arguments])
    big = PreLNBertForMaskedLM.from_pretrained(tmp_path / "big").eval()
    assert big.config.intermediate_size == 33
    assert big.config.layer_norm_eps == pytest.approx(small.config.layer_norm_eps * 16 / 20)
    assert max_output_difference(small, big, tokens()) < 1e-5


def test_a_file_of_timm_becomes_a_file(tmp_path):
    small = small_vit(tmp_path / "small.pt")
    arguments = ["--source-model", "vit_tiny_patch16_224", "--source-args", json.dumps(SMALL)]
    size = ["--hidden-size", "24", "--num-layers", "3"]
    main(["expand", str(tmp_path / "small.pt"), str(tmp_path / "big.pt"), *arguments, *size])
    content = torch.load(tmp_path / "big.pt", weights_only=True)
    assert content["factory"] == "vit_tiny_patch16_224"
    big = load_expanded(timm.create_model(content["factory"], **content["arguments"]), str(tmp_path / "big.pt"))
    assert (big.embed_dim, len(big.blocks), big.blocks[0].attn.num_heads) == (24, 3, 3)
    assert max_output_difference(small, big, images().float()) < 1e-5
    # What the command wrote it can read without being told the model.
    main(["expand", str(tmp_path / "big.pt"), str(tmp_path / "bigger.pt"), "--hidden-size", "40"])
    content = torch.load(tmp_path / "bigger.pt", weights_only=True)
    bigger = load_expanded(timm.create_model(content["factory"], **content["arguments"]), str(tmp_path / "bigger.pt"))
    assert max_output_difference(small, bigger, images().float()) < 1e-5


def test_a_checkpoint_of_the_command_line_describes_its_network(tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", **SMALL)
    torch.save(
        {
            "state_dict": {f"network.{key}": value for key, value in network.state_dict().items()},
            "hyper_parameters": {
                "network": {
                    "class_path": "timm.create_model",
                    "init_args": {"model_name": "vit_tiny_patch16_224"},
                    "dict_kwargs": SMALL,
                },
                "num_classes": 5,
            },
        },
        tmp_path / "last.ckpt",
    )
    arguments = ["--target-args", json.dumps({"embed_dim": 32, "num_heads": 4, "depth": 2})]
    main(["expand", str(tmp_path / "last.ckpt"), str(tmp_path / "big.pt"), *arguments])
    content = torch.load(tmp_path / "big.pt", weights_only=True)
    big = load_expanded(timm.create_model(content["factory"], **content["arguments"]), str(tmp_path / "big.pt"))
    assert max_output_difference(network, big, images().float()) < 1e-5


def basic_resnet(layers: list[int]) -> torch.nn.Module:
    return ResNet(BasicBlock, layers, num_classes=3)


def test_a_factory_by_its_import_path(tmp_path):
    network = basic_resnet([1, 1, 1, 1])
    torch.save(network.state_dict(), tmp_path / "small.pt")
    name, sizes = f"{__name__}.basic_resnet", ({"layers": [1, 1, 1, 1]}, {"layers": [1, 2, 1, 1]})
    arguments = ["--source-model", name, "--source-args", json.dumps(sizes[0]), "--target-args", json.dumps(sizes[1])]
    main(["expand", str(tmp_path / "small.pt"), str(tmp_path / "big.pt"), *arguments])
    big = load_expanded(basic_resnet([1, 2, 1, 1]), str(tmp_path / "big.pt"))
    assert max_output_difference(network, big, torch.randn(2, 3, 64, 64)) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.pt", "big.pt"], "no checkpoint nothing.pt"),
        (["small.pt", "big.pt"], "--source-model"),
        (["small.pt", "small.pt"], "the source itself"),
        (["small.pt", "big.pt", "--source-model", "vit_tinny"], "neither a model of timm"),
        (["small.pt", "big.pt", "--source-model", "vit_tiny_patch16_224", "--hidden-size", "20"], "do not fit"),
        (["small.pt", "big.pt", "--source-args", "[1]"], "JSON object"),
        ([".", "big"], "no config.json"),
    ],
)
def test_mistakes_end_with_a_message(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small_vit(tmp_path / "small.pt")
    with pytest.raises(SystemExit) as stop:
        main(["expand", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
