"""The command line: short names, defaults, checkpoints, resuming, and what a mistake looks like."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from lightning_methods.cli import differences, find_checkpoint, main, run, short_names
from lightning_methods.core import Classifier

CONFIG = """
model:
  class_path: Classifier
  init_args:
    num_classes: 10
    network: {class_path: SmallConvNet, init_args: {channels: [8], num_classes: 10}}
data: {class_path: DigitsDataModule, init_args: {batch_size: 128, train_size: 300, val_size: 100, test_size: 100}}
trainer: {max_epochs: 2, enable_progress_bar: false, enable_model_summary: false, accelerator: cpu}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    Path("tiny.yaml").write_text(CONFIG)
    return tmp_path


def fit(*args: str, config: str = "tiny.yaml"):
    return run(["fit", "--config", config, *args])


def test_short_names_point_home():
    names = short_names()
    assert names["Classifier"] == "lightning_methods.core.Classifier"
    assert names["DigitsDataModule"] == "datamodules.DigitsDataModule"


def test_fit_leaves_metrics_config_and_checkpoint_and_tests():
    cli = fit()
    assert set(cli.test_metrics) == {"test/acc", "test/loss"}
    run_folder = Path("runs/tiny/version_0")
    assert {"metrics.csv", "config.yaml"} <= {path.name for path in run_folder.iterdir()}
    assert (run_folder / "checkpoints" / "last.ckpt").is_file()
    fit("--test_after_fit=false")  # a second run neither fails nor overwrites the first
    assert Path("runs/tiny/version_1").is_dir()


def test_checkpoint_reloads_in_one_line_and_predicts_the_same():
    cli = fit("--model.init_args.network.init_args.channels=[4,6]")
    x = torch.rand(5, 1, 8, 8)
    again = Classifier.load_from_checkpoint(find_checkpoint("runs/tiny", "last"))
    assert [m.out_channels for m in again.modules() if isinstance(m, torch.nn.Conv2d)] == [4, 6]
    torch.testing.assert_close(again.eval()(x), cli.model.eval()(x), rtol=0, atol=0)


def test_test_uses_the_checkpoints_hyperparameters(capsys):
    fitted = fit("--model.init_args.network.init_args.channels=[4,6]")
    tested = run(["test", "--config", "tiny.yaml", "--ckpt_path", "last"])
    assert tested.test_metrics == fitted.test_metrics
    assert "channels: [8] in the configuration, [4, 6] in the checkpoint" in capsys.readouterr().out


def weights(cli) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in cli.model.state_dict().items()}


def test_resume_equals_the_uninterrupted_run():
    noisy = "--data.init_args.train_transform=torch.nn.Dropout"
    dropout = "--model.init_args.network.init_args.norm=batch"
    whole = fit(noisy, dropout, "--trainer.max_epochs=4", "--trainer.default_root_dir=runs/whole")
    fit(noisy, dropout, "--trainer.max_epochs=2", "--trainer.default_root_dir=runs/parts")
    resumed = fit(noisy, dropout, "--trainer.max_epochs=4", "--trainer.default_root_dir=runs/parts", "--ckpt_path=last")
    assert resumed.trainer.global_step == whole.trainer.global_step
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=0, atol=0)
    # one folder, and the rows of both parts
    assert not Path("runs/parts/version_1").exists()
    with open("runs/parts/version_0/metrics.csv", newline="") as file:
        epochs = {row["epoch"] for row in csv.DictReader(file) if row["val/acc"]}
    assert epochs == {"0", "1", "2", "3"}


def test_last_is_written_every_epoch_also_when_nothing_improves():
    best = (
        "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: val/acc, mode: max, save_last: true}}"
    )
    fit(
        best,
        "--trainer.max_epochs=3",
        "--model.init_args.optimizer={class_path: torch.optim.SGD, init_args: {lr: 0.0}}",
    )
    assert torch.load(find_checkpoint("runs/tiny", "last"), weights_only=True)["epoch"] == 2
    assert torch.load(find_checkpoint("runs/tiny", "best"), weights_only=True)["epoch"] == 0
    names = {path.name for path in Path("runs/tiny/version_0/checkpoints").iterdir()}
    assert names == {"last.ckpt", "epoch=0-step=3.ckpt"}


def test_last_without_a_checkpoint_starts_from_the_beginning(capsys):
    cli = fit("--ckpt_path=last", "--trainer.max_epochs=1")
    assert cli.trainer.current_epoch == 1
    assert "starts from the beginning" in capsys.readouterr().out


def test_runs_are_seeded():
    a, b = (weights(fit(f"--trainer.default_root_dir=runs/{name}")) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    c = weights(fit("--seed_everything=1"))
    assert any(not torch.equal(a[name], c[name]) for name in a)


def error_of(monkeypatch, capsys, *args: str) -> str:
    monkeypatch.setattr("sys.argv", ["train.py", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code not in (0, None)
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("num_classes: 10\n", ("num_clases: 10\n", "Did you mean 'num_classes'?")),
        ("class_path: Classifier", ("class_path: Clasifier", "Did you mean 'Classifier'?")),
        ("SmallConvNet", ("SmalConvNet", "Did you mean 'SmallConvNet'?")),
        ("DigitsDataModule", ("DigitDataModule", "Did you mean 'DigitsDataModule'?")),
        ("batch_size: 128", ("batch_sise: 128", "Did you mean 'batch_size'?")),
        ("batch_size: 128", ("batch_size: 0", "batch_size must be")),
        ("max_epochs", ("max_epocs", "Did you mean 'trainer.max_epochs'?")),
        ("trainer:", ("trainr:", "Did you mean 'trainer'?")),
        ("num_classes: 10\n", ("num_classes: ten\n", '"num_classes"')),
        ("max_epochs: 2", ("max_epochs: two", "max_epochs")),
    ],
)
def test_a_mistake_in_the_config_names_the_key(monkeypatch, capsys, wrong, says):
    Path("bad.yaml").write_text(CONFIG.replace(wrong, says[0], 1))
    assert says[1] in error_of(monkeypatch, capsys, "fit", "--config", "bad.yaml")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("fit", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("fitt", "--config", "tiny.yaml"), "invalid choice: 'fitt'"),
        (("fit", "--config", "tiny.yaml", "--model.num_clases=3"), "Did you mean 'num_classes'?"),
        (("fit", "--config", "tiny.yaml", "--trainer.max_epocs=3"), "max_epocs"),
        (("fit", "--config", "tiny.yaml", "--model.optimizer=Adamm"), "Adamm"),
        (("test", "--config", "tiny.yaml", "--ckpt_path=nowhere.ckpt"), "no such checkpoint"),
        (("test", "--config", "tiny.yaml", "--ckpt_path=last"), "run `fit` first"),
        (("fit", "--config", "tiny.yaml", "--trainer.default_root_dir=/proc/runs"), "cannot be written"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(monkeypatch, capsys, args, says):
    assert says in error_of(monkeypatch, capsys, *args)


def test_differences_are_named_by_their_path():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}) == {"a.b": (1, 3)}
