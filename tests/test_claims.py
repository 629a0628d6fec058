"""The claim runner: what a claim may say, how it is judged, and that a run is resumed, reported and stopped."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from scipy import stats

from lightning_methods.claims.app import main
from lightning_methods.claims.definition import load_claim, plan
from lightning_methods.claims.expressions import ClaimError, Expression, t_interval, verdict
from lightning_methods.claims.tables import update_documents

REPOSITORY = Path(__file__).parents[1]

TOY = {
    "claim": "The gain is a gain.",
    "source": "Nobody (2025), table 1",
    "metric": "test/acc",
    "runs": {
        "low": {"call": "tests.claims_toy.measure", "arguments": {"seed": "{seed}"}},
        "high": {"call": "tests.claims_toy.measure", "arguments": {"seed": "{seed}", "gain": 0.3}},
    },
    "expect": ["high - low > 0.1"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "configs" / "toy").mkdir(parents=True)
    return tmp_path


def write(root: Path, **changes: object) -> Path:
    path = root / "configs" / "toy" / "claim.yaml"
    path.write_text(yaml.safe_dump({**TOY, **changes}, sort_keys=False), encoding="utf-8")
    return path


def run(root: Path, *arguments: str) -> tuple[int, str]:
    output = StringIO()
    status = main(["toy", "--workers", "2", *arguments], root, Console(file=output, width=200, soft_wrap=True))
    return status, output.getvalue()


def saved(root: Path) -> dict:
    text = (root / "docs" / "claims" / "toy.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# expressions and verdicts


@pytest.mark.parametrize(
    ("text", "difference", "margin", "comparison"),
    [
        ("a - b > 0.1", 1.0, 0.1, ">"),
        ("a > b + 0.1", 1.0, 0.1, ">"),
        ("0.1 + b < a", -1.0, -0.1, "<"),
        ("a - 0.5 >= b - 0.25", 1.0, 0.25, ">="),
        ("a <= 0.7 * b", 3.0 - 1.4, 0.0, "<="),
        ("a / b >= 2", 1.5, 2.0, ">="),
        ("-(a - b) < -(0.2 - 0.3)", -1.0, 0.1, "<"),
        ("a:test/loss / b:test/loss > 1", 4.0, 1.0, ">"),
        ("min(a, b) - max(a:test/loss, b) > -2 ** 2", 2.0 - 8.0, -4.0, ">"),
        ("abs(b - a) < 0.06", 1.0, 0.06, "<"),
        ("b < 0.2", 2.0, 0.2, "<"),
        ("a:val/sim@5 > 3 * 0.1", 7.0, 0.3, ">"),
    ],
)
def test_expression_normal_form(text: str, difference: float, margin: float, comparison: str):
    values = {
        ("a", "test/acc"): 3.0,
        ("b", "test/acc"): 2.0,
        ("a", "test/loss"): 8.0,
        ("b", "test/loss"): 2.0,
        ("a", "val/sim@5"): 7.0,
    }
    expression = Expression(text, "test/acc")
    assert expression.difference(values) == pytest.approx(difference, abs=1e-12)
    assert expression.margin == pytest.approx(margin, abs=1e-12)
    assert expression.comparison == comparison


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a - b", "exactly one comparison"),
        ("a > b > c", "exactly one comparison"),
        ("a == b", "exactly one comparison"),
        ("a > ", "cannot be read"),
        ("1 > 0", "names no run"),
        ("__import__('os').system('true') > 0", "not arithmetic"),
        ("a.b > 0", "not arithmetic"),
        ("a[0] > 0", "not arithmetic"),
        ("(lambda: 1)() > 0", "not arithmetic"),
        ("abs(a, b) > 0", "not arithmetic"),
        ("max(*a) > 0", "not arithmetic"),
        ("a > 'text'", "not arithmetic"),
        ("a > True", "not arithmetic"),
        ("a and b > 0", "exactly one comparison"),
    ],
)
def test_expression_errors(text: str, message: str):
    with pytest.raises(ClaimError, match=message):
        Expression(text, "test/acc")


@pytest.mark.bad_input
def test_expression_without_any_metric():
    with pytest.raises(ClaimError, match="write a:test/acc"):
        Expression("a > 0")


def test_interval_is_scipys():
    values = np.random.default_rng(0).normal(0.2, 0.05, 5)
    mean, low, high = t_interval(values.tolist())
    expected = stats.t.interval(0.95, len(values) - 1, loc=values.mean(), scale=stats.sem(values))
    assert (mean, low, high) == pytest.approx((values.mean(), *expected), rel=1e-12)
    # A paired difference is a one-sample t-test: the margin at an end of the interval has p = 0.05.
    assert stats.ttest_1samp(values, low).pvalue == pytest.approx(0.05, rel=1e-9)


def test_interval_of_equal_values_and_of_one():
    assert t_interval([0.3, 0.3, 0.3]) == pytest.approx((0.3, 0.3, 0.3))
    mean, low, high = t_interval([0.3])
    assert mean == 0.3
    assert math.isnan(low)
    assert math.isnan(high)


def judge(text: str, a: list[float], b: list[float], every_seed: bool = False):
    values = [{("a", "m"): x, ("b", "m"): y} for x, y in zip(a, b, strict=True)]
    return verdict(Expression(text, "m"), values, every_seed)


def test_verdict_pairs_the_seeds():
    # The runs vary a lot between seeds, and together: only the paired difference is clear.
    a, b = [0.2, 0.5, 0.9], [0.1, 0.39, 0.81]
    judged = judge("a > b", a, b)
    paired = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (judged.low, judged.high) == pytest.approx((paired.low, paired.high), rel=1e-9)
    assert judged.holds
    assert stats.ttest_ind(a, b).pvalue > 0.5


def test_verdict_needs_the_whole_interval():
    # The mean 0.2 is above the margin, the lower end -0.05 is not.
    judged = judge("a - b > 0.1", [0.1, 0.2, 0.3], [0.0, 0.0, 0.0])
    assert judged.mean == pytest.approx(0.2)
    assert not judged.holds
    assert judge("a - b > -0.1", [0.1, 0.2, 0.3], [0.0, 0.0, 0.0]).holds


def test_verdict_below():
    assert judge("a < 0.2", [0.10, 0.11, 0.12], [0, 0, 0]).holds
    assert not judge("a < 0.2", [0.10, 0.11, 0.19], [0, 0, 0]).holds
    assert judge("a - b <= 0", [0.1, 0.1], [0.1, 0.1]).holds
    assert not judge("a - b < 0", [0.1, 0.1], [0.1, 0.1]).holds


def test_verdict_of_every_seed():
    judged = judge("a > 0.09", [0.1, 0.2, 0.3], [0, 0, 0], every_seed=True)
    assert judged.holds
    assert not judge("a > 0.09", [0.1, 0.2, 0.3], [0, 0, 0]).holds
    assert not judge("a > 0.15", [0.1, 0.9, 0.9], [0, 0, 0], every_seed=True).holds


def test_verdict_of_one_seed_and_of_nan():
    assert not judge("a > 0", [1.0], [0.0]).holds
    assert not judge("a > 0", [1.0, math.nan, 1.0], [0, 0, 0]).holds
    assert not judge("a < 2", [1.0, math.nan, 1.0], [0, 0, 0]).holds
    assert not judge("a / b > 0", [1.0, 1.0], [0.0, 0.0], every_seed=True).holds


# claim files


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expects": []}, r"unknown key 'expects'. Did you mean 'expect'\?"),
        ({"source": None}, "source must be a sentence"),
        ({"seeds": [0, 0]}, "seeds must be different whole numbers"),
        ({"seeds": 3}, "seeds must be a list"),
        ({"expect": []}, "expect is empty"),
        ({"expect": ["high - lwo > 0"]}, r"expect\[0\]: unknown run 'lwo'. Did you mean 'low'\?"),
        ({"expect": [{"expression": "high > low", "margin": 1}]}, "unknown key 'margin'"),
        ({"expect": ["high"]}, r"expect\[0\]: .*exactly one comparison"),
        ({"metric": None, "expect": ["high > low"]}, "has no metric"),
        ({"base": "diggits.yaml"}, "base: there is no diggits.yaml"),
        ({"runs": {"a-b": {"args": []}}}, "letters, digits and underscores"),
        ({"runs": {"low": {"args": []}, "high": {}}}, "runs.low: there is no base config"),
        ({"runs": {"low": {"call": "measure"}, "high": {}}}, "package.module.function"),
        ({"runs": {"low": {"call": "a.b", "args": []}, "high": {}}}, "runs.low: unknown key 'args'"),
        ({"args": "--trainer.max_epochs=1"}, "args must be a list of strings"),
        ({"args": [{"--a": "b"}]}, "quote what has a colon"),
        (
            {"runs": {"low": {"call": "a.b", "arguments": {"x": "{checkpoint:hihg}"}}, "high": {"call": "a.b"}}},
            r"runs.low starts from an unknown run 'hihg'. Did you mean 'high'\?",
        ),
        (
            {
                "runs": {
                    "low": {"call": "a.b", "arguments": {"x": "{checkpoint:high}"}},
                    "high": {"call": "a.b", "arguments": {"x": "{folder:low}"}},
                }
            },
            "wait for each other",
        ),
        ({"runs": {**TOY["runs"], "low": {**TOY["runs"]["low"], "hidden": True}}}, "the run low is hidden"),
    ],
)
def test_claim_file_errors(root: Path, changes: dict, message: str):
    path = write(root, **changes)
    with pytest.raises(ClaimError, match=message) as error:
        load_claim(path, root)
    assert "configs/toy/claim.yaml" in str(error.value)


def test_plan_of_configs(root: Path):
    (root / "configs" / "toy" / "digits.yaml").write_text("model: Toy\n")
    (root / "configs" / "other.yaml").write_text("model: Other\n")
    runs = {
        "after": {
            "args": [
                "--model.start={checkpoint:before}",
                "--model.network={class_path: Net}",
                "--trainer.max_epochs",
                3,
            ]
        },
        "before": {"config": "configs/other.yaml", "common_args": False, "hidden": True},
        "stacked": {"config": ["digits.yaml", "configs/other.yaml"], "subcommand": "test"},
    }
    common = {"base": "digits.yaml", "args": ["--data.seed={seed}"], "seeds": [3, 5]}
    claim = load_claim(write(root, **common, runs=runs, expect=["after > stacked"]), root)
    jobs = {(job.run, job.seed): job for job in plan(claim)}
    assert [job.run for job in plan(claim)] == ["before", "after", "stacked"] * 2
    assert jobs["before", 3].args == ("--config", str(root / "configs/other.yaml"))
    after = jobs["after", 5]
    assert after.needs == ("before",)
    assert after.fill(after.args, {"before": "/x/best.ckpt"}) == [
        "--config",
        str(root / "configs/toy/digits.yaml"),
        "--data.seed=5",
        "--model.start=/x/best.ckpt",
        "--model.network={class_path: Net}",
        "--trainer.max_epochs",
        "3",
    ]
    assert jobs["stacked", 3].subcommand == "test"
    assert jobs["stacked", 3].args[:4:2] == ("--config", "--config")
    assert [job.run for job in plan(claim, only=["after"])] == ["before", "after"] * 2
    with pytest.raises(ClaimError, match=r"unknown run 'aftr'. Did you mean 'after'"):
        plan(claim, only=["aftr"])


def test_fingerprint_follows_what_a_result_depends_on(root: Path):
    config = root / "configs" / "toy" / "digits.yaml"
    config.write_text("lr: 1\n")
    runs = {"first": {}, "second": {"args": ["--x={checkpoint:first}"]}, "third": {"args": ["--y=1"]}}

    def prints(**changes: object) -> dict[str, str]:
        claim = load_claim(
            write(root, **{"base": "digits.yaml", "expect": ["first > third"], "runs": runs, **changes}), root
        )
        return {f"{job.run}{job.seed}": job.fingerprint for job in plan(claim)}

    before = prints()
    assert len(set(before.values())) == 9
    assert prints(claim="Other words.", note="A note.", expect=["first > second"]) == before
    changed = prints(runs={**runs, "first": {"args": ["--lr=2"]}})
    differ = {name[:-1] for name in before if changed[name] != before[name]}
    assert differ == {"first", "second"}, "and what starts from it"
    config.write_text("lr: 2\n")
    assert not set(prints().values()) & set(before.values())


# running


def test_claim_holds(root: Path):
    write(root)
    status, output = run(root)
    assert status == 0
    result = saved(root)
    keys = "slug claim source metric seeds runs expect holds seconds versions"
    assert list(result) == keys.split()
    assert result["seeds"] == [0, 1, 2]
    assert result["runs"]["high"]["test/acc"] == {"values": [0.8, 0.9, 1.0], "mean": 0.9, "std": 0.1}
    assert set(result["runs"]["low"]) == {"test/acc", "test/loss"}
    (item,) = result["expect"]
    assert item["holds"] is result["holds"] is True
    assert [item[key] for key in ("mean", "low", "high", "margin")] == pytest.approx([0.3, 0.3, 0.3, 0.1])
    assert set(result["versions"]) == {"python", "torch", "lightning", "lightning_methods"}
    assert (root / "docs" / "claims" / "toy.png").stat().st_size > 5000
    assert "0.900 ± 0.100" in output
    assert "margin 0.100: holds" in output


def test_claim_does_not_hold(root: Path):
    runs = {name: {**TOY["runs"][name], "call": "tests.claims_toy.noisy"} for name in TOY["runs"]}
    expect = [
        {"expression": "high - low > 0.2", "why": "The mean is 0.6."},
        {"expression": "high - low > 0.2", "every_seed": True},
        {"expression": "low < 0.1"},
    ]
    write(root, runs=runs, expect=expect, note="A toy.")
    status, output = run(root)
    assert status == 0, "a claim that does not hold is a result"
    result = saved(root)
    differences = 0.3 * np.array([1, 2, 3])
    low, high = stats.t.interval(0.95, 2, loc=differences.mean(), scale=stats.sem(differences))
    assert [item["holds"] for item in result["expect"]] == [False, True, False]
    assert [result["expect"][0][key] for key in ("mean", "low", "high")] == pytest.approx([0.6, low, high], rel=1e-5)
    assert result["expect"][1]["every_seed"] is True
    assert result["expect"][0]["why"] == "The mean is 0.6."
    assert result["holds"] is False
    assert result["note"] == "A toy."
    assert "toy does not hold" in output


def test_resume_and_fresh(root: Path):
    count = root / "count"
    arguments = {"seed": "{seed}", "folder": "{folder}", "count": str(count)}
    runs = {
        "low": {"call": "tests.claims_toy.counted", "arguments": arguments},
        "high": {"call": "tests.claims_toy.counted", "arguments": {**arguments, "gain": 0.3}},
    }
    write(root, runs=runs)

    def new() -> list[str]:
        lines = sorted(count.read_text().split()) if count.exists() else []
        count.unlink(missing_ok=True)
        return lines

    assert run(root, "--only", "low")[0] == 0
    assert new() == ["low/0", "low/1", "low/2"]
    assert not (root / "docs").exists(), "half a claim is no result"
    assert run(root)[0] == 0
    assert new() == ["high/0", "high/1", "high/2"]
    first = saved(root)
    # What an interrupted worker leaves is run again; what is finished is not.
    (root / "runs/claims/toy/high/seed1/result.json").rename(root / "runs/claims/toy/high/seed1/result.json.part")
    assert run(root)[0] == 0
    assert new() == ["high/1"]
    assert saved(root)["runs"] == first["runs"]
    # A changed argument is another run.
    runs["high"]["arguments"]["gain"] = 0.4
    write(root, runs=runs)
    assert run(root)[0] == 0
    assert new() == ["high/0", "high/1", "high/2"]
    assert saved(root)["runs"]["high"]["test/acc"]["mean"] == pytest.approx(1.0)
    assert run(root, "--fresh")[0] == 0
    assert len(new()) == 6


def test_failure_is_reported_and_others_go_on(root: Path):
    switch = root / "switch"
    runs = {
        "bad": {"call": "tests.claims_toy.failing", "arguments": {"seed": "{seed}", "switch": str(switch)}},
        "after": {"call": "tests.claims_toy.measure", "arguments": {"seed": "{seed}", "gain": "{checkpoint:bad}"}},
        **TOY["runs"],
    }
    write(root, runs={name: runs[name] for name in ("bad", "low", "high")})
    status, output = run(root)
    assert status == 1
    assert "toy: run bad, seed 1 failed: it ended with status 1" in output
    assert "RuntimeError: the reason of the failure" in output
    assert "about to fail" in output
    assert str(root / "runs/claims/toy/bad/seed1/log.txt") in output
    assert "no verdict, bad did not run with every seed" in output
    assert not (root / "docs").exists()
    assert len(list((root / "runs/claims/toy").glob("*/seed*/result.json"))) == 8
    switch.touch()
    assert run(root)[0] == 0
    assert saved(root)["holds"] is True
    # A run that starts from one that fails, or that left no checkpoint, says so.
    write(root, runs=runs)
    status, output = run(root)
    assert status == 1
    assert "the run bad left no checkpoint for after" in output
    switch.unlink()
    status, output = run(root, "--fresh", "--only", "after")
    assert status == 1
    assert "seed 1 failed: it starts from bad, which failed" in output


def test_a_run_starts_from_another(root: Path):
    runs = {
        "tuned": {
            "call": "tests.claims_toy.finetune",
            "arguments": {"seed": "{seed}", "start": "{checkpoint:before}", "source": "{folder:before}"},
        },
        "before": {
            "call": "tests.claims_toy.pretrain",
            "arguments": {"seed": "{seed}", "folder": "{folder}"},
            "hidden": True,
        },
    }
    write(root, runs=runs, expect=["tuned > 0.5"])
    assert run(root)[0] == 0
    assert list(saved(root)["runs"]) == ["tuned"]


def test_nan_is_null(root: Path):
    runs = {**TOY["runs"], "high": {"call": "tests.claims_toy.not_a_number", "arguments": {"seed": "{seed}"}}}
    write(root, runs=runs)
    assert run(root)[0] == 0
    result = saved(root)
    assert result["runs"]["high"]["test/acc"] == {"values": [None] * 3, "mean": None, "std": None}
    assert result["expect"][0]["low"] is None
    assert result["holds"] is False


def test_one_thread_each(root: Path):
    runs = {"one": {"call": "tests.claims_toy.threads", "arguments": {"seed": "{seed}"}}}
    write(root, metric="test/threads", expect=["one > 0"], runs=runs)
    assert run(root)[0] == 0
    assert saved(root)["runs"]["one"]["test/threads"]["values"] == [1, 1, 1]


def test_other_seeds(root: Path):
    write(root)
    status, output = run(root, "--seeds", "2")
    assert status == 0
    assert not (root / "docs").exists()
    result = json.loads((root / "runs/claims/toy/result.json").read_text())
    assert result["seeds"] == [0, 1]
    assert "not docs/claims" in output
    assert run(root, "--seeds", "4")[0] == 0
    assert saved(root)["seeds"] == [0, 1, 2, 3]


def test_unknown_metric_names_the_nearest(root: Path):
    write(root, expect=["high:test/los > low:test/loss"])
    status, output = run(root)
    assert status == 2
    assert "unknown metric 'test/los'. Did you mean 'test/loss'?" in output


def test_usage_and_unknown_method(root: Path, capsys: pytest.CaptureFixture[str]):
    write(root)
    assert main([], root) == 2
    assert "Methods with a claim: toy." in capsys.readouterr().out
    output = StringIO()
    assert main(["tyo"], root, Console(file=output, width=200)) == 2
    assert "unknown method 'tyo'. Did you mean 'toy'?" in output.getvalue()
    assert run(root, "--workers", "0")[0] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_workers(root: Path, number: int):
    arguments = {"seed": "{seed}", "folder": "{folder}"}
    runs = {"low": {"call": "tests.claims_toy.sleeping", "arguments": arguments}, "high": TOY["runs"]["high"]}
    write(root, runs=runs)
    command = [sys.executable, "-m", "lightning_methods.claims", "toy", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pids: list[int] = []
        deadline = time.monotonic() + 120
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            pids = [int(text) for path in root.glob("runs/claims/toy/low/*/pid") if (text := path.read_text())]
        assert len(pids) == 2
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command continues" in output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_command_line_runs(root: Path):
    (root / "configs" / "toy" / "base.yaml").write_text(
        """
model: {class_path: tests.claims_toy_module.ToyRegression}
data: {class_path: tests.claims_toy_module.ToyData}
trainer: {max_epochs: 5, accelerator: cpu}
""",
        encoding="utf-8",
    )
    runs = {
        "trained": {},
        "untrained": {"args": ["--model.init_args.lr=0"]},
        "again": {"subcommand": "test", "args": ["--ckpt_path={checkpoint:trained}"]},
    }
    expect = [
        {"expression": "untrained - trained > 0.1", "every_seed": True},
        {"expression": "abs(again - trained) <= 1e-6", "every_seed": True},
    ]
    common = {"base": "base.yaml", "args": ["--data.init_args.seed={seed}"], "metric": "test/loss", "seeds": [0, 1]}
    write(root, **common, runs=runs, expect=expect)
    command = [sys.executable, "-m", "lightning_methods.claims", "toy", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    result = saved(root)
    assert result["holds"] is True
    assert set(result["runs"]["trained"]) >= {"test/loss", "test/norm"}
    assert len(set(result["runs"]["untrained"]["test/norm"]["values"])) == 2, "every seed has its own weights"
    folder = root / "runs" / "claims" / "toy" / "trained" / "seed1"
    assert (folder / "metrics.csv").exists()
    checkpoint = Path(json.loads((folder / "result.json").read_text())["checkpoint"])
    assert checkpoint.suffix == ".ckpt"
    assert checkpoint.is_relative_to(folder)
    assert not list(root.glob("lightning_logs"))


# documents


RESULTS = sorted((REPOSITORY / "docs" / "claims").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_saved_result_is_that_of_the_claim(path: Path):
    """A claim that was edited after its runs has to be run again."""
    result = json.loads(path.read_text(encoding="utf-8"))
    claim = load_claim(REPOSITORY / "configs" / path.stem / "claim.yaml", REPOSITORY)
    assert (result["claim"], result["source"]) == (claim.claim, claim.source)
    assert set(result["seeds"]) >= set(claim.seeds)
    assert list(result["runs"]) == claim.shown
    assert [item["expression"] for item in result["expect"]] == [item.expression.text for item in claim.expect]
    assert result["holds"] is all(item["holds"] for item in result["expect"])
    assert path.with_suffix(".png").exists()


def test_documents_show_the_saved_results():
    """``python -m lightning_methods.claims --table`` brings them up to date."""
    assert update_documents(REPOSITORY, check=True) == []


def test_table_and_card(root: Path):
    write(root, note="A toy.")
    assert run(root)[0] == 0
    package = root / "lightning_methods" / "toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Toy: makes a gain."""\n')
    card = package / "README.md"
    card.write_text("# Toy\n\n<!-- claim -->\nstale\n<!-- /claim -->\n\nThe end.\n")
    readme = root / "README.md"
    readme.write_text("Before\n<!-- methods -->\n<!-- /methods -->\nAfter\n")
    assert update_documents(root, check=True) == [readme, card]
    assert "stale" in card.read_text()
    assert main(["--table"], root, Console(file=StringIO())) == 0
    text = card.read_text()
    assert "stale" not in text
    assert text.endswith("<!-- /claim -->\n\nThe end.\n")
    assert "| high | 0.900 ± 0.100 |" in text
    assert "`high - low > 0.1`: mean 0.300, 95 % interval [0.300, 0.300], margin 0.100: holds." in text
    image = re.search(r"!\[.*\]\((.*)\)", text)
    assert image is not None
    assert (package / image[1]).resolve() == root / "docs" / "claims" / "toy.png"
    row = "| [toy](lightning_methods/toy/README.md) | Toy: makes a gain. | The gain is a gain. | [holds]"
    assert row in readme.read_text()
    assert update_documents(root) == [], "a second time nothing changes"


@pytest.mark.bad_input
def test_card_without_a_place(root: Path):
    write(root)
    assert run(root)[0] == 0
    card = root / "lightning_methods" / "toy" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text("# Toy\n")
    (card.parent / "__init__.py").write_text('"""Toy."""\n')
    output = StringIO()
    assert main(["--table"], root, Console(file=output, width=300)) == 2
    assert "must have one block between <!-- claim --> and <!-- /claim -->" in output.getvalue()
