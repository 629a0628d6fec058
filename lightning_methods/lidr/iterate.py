"""The whole method: answer, translate, pair, fit, and again with the model that came out; from any stage on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch.distributed as dist

from ..core.checks import check_range
from ..core.distributed import rank, world_size
from ..core.io import read_jsonl, write_jsonl
from .generate import ResponseGenerator, assemble, check_parallel
from .preference import ParallelRecord, PreferencePair, build_preference_pairs

__all__ = ["CommandLineFit", "Fit", "TrainerFit", "make_records", "read_prompts", "run_iterations"]


@runtime_checkable
class Fit(Protocol):
    """The optimisation of one iteration."""

    def __call__(self, model: str, pairs: Path, folder: Path, save_to: Path) -> None:
        """Train ``model`` on the pairs, with checkpoints in ``folder``, and write the result to ``save_to``."""


# prompts


def read_prompts(
    files: Mapping[str, str | Path], size: int | None = None, sets: int | None = None
) -> tuple[list[dict[str, list[str]]], list[list[str]]]:
    """Parallel prompts from JSON lines ``{"id", "instruction"}``, one file for each language, in disjoint slices.

    Prompts are aligned by id, in the order of the first file; those that a language lacks are left out.

    Args:
        files: path by language.
        size: prompts in a slice; None for all in one.
        sets: number of slices; None for as many as there are whole ones.

    Returns:
        The prompts of each slice by language, and their ids.

    Raises:
        ValueError: an id occurs twice in a file, or there are not enough prompts.
    """
    tables = {}
    for language, path in files.items():
        rows = read_jsonl(path, required=("id", "instruction"))
        tables[language] = {str(row["id"]): row["instruction"] for row in rows}
        if len(tables[language]) < len(rows):
            raise ValueError(f"{path}: an id occurs more than once.")
    first = next(iter(tables.values()))
    ids = [number for number in first if all(number in table for table in tables.values())]
    size = len(ids) if size is None else size
    sets = max(len(ids) // max(size, 1), 1) if sets is None else sets
    if not ids or sets * size > len(ids):
        raise ValueError(f"{sets} sets of {size} prompts were asked, but all languages share {len(ids)} prompts.")
    slices = [ids[i * size : (i + 1) * size] for i in range(sets)]
    return [{code: [table[n] for n in part] for code, table in tables.items()} for part in slices], slices


# stages


def _stage(path: Path, compute: Callable[[], list[dict[str, Any]]], primary: bool) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, computed by all ranks and written by the first if it is not there."""
    done = [path.is_file()]
    if world_size() > 1:
        dist.broadcast_object_list(done)  # all ranks have to take the same way
    if done[0]:
        return read_jsonl(path)
    rows = compute()
    if primary:
        write_jsonl(path, rows)
    return rows


def make_records(
    generator: Callable[[], ResponseGenerator],
    prompts: Mapping[str, Sequence[str]],
    ids: Sequence[str],
    folder: str | Path,
    dominant: str = "en",
    prompt_wrapper: Callable[[str, str], str] | None = None,
) -> list[ParallelRecord]:
    """Answers and translations of one iteration, each language and direction in a file of its own.

    Files that are there are read: an interrupted run goes on behind the last of them. Answers are in
    ``responses_<language>.jsonl`` (``id, prompt, instruction, response``), translations in
    ``translations_<from>-<to>.jsonl`` (``id, response, translation``).

    Args:
        generator: makes the generator; called only if something has to be generated.
        prompts: parallel prompts by language.
        ids: of the prompts.
        folder: of the files.
        dominant: code of the dominant language.
        prompt_wrapper: what is made of a prompt before it is asked, ``(prompt, language) -> str``.

    Raises:
        ValueError: the prompts are not parallel, or a file belongs to other prompts.
    """
    folder = Path(folder)
    given = check_parallel(prompts, ids, dominant)
    made: list[ResponseGenerator] = []

    def model() -> ResponseGenerator:
        if not made:
            made.append(generator())
        return made[0]

    primary = rank() == 0
    asked = {
        code: [prompt_wrapper(text, code) if prompt_wrapper else text for text in texts]
        for code, texts in given.items()
    }
    responses: dict[str, list[str]] = {}
    for code, texts in asked.items():

        def respond(code: str = code, texts: list[str] = texts) -> list[dict[str, Any]]:
            answers = model().respond(texts)
            rows = zip(ids, texts, given[code], answers, strict=True)
            return [{"id": i, "prompt": p, "instruction": q, "response": r} for i, p, q, r in rows]

        rows = _stage(folder / f"responses_{code}.jsonl", respond, primary)
        _check_ids(folder / f"responses_{code}.jsonl", rows, ids)
        responses[code] = [row["response"] for row in rows]
    translations: dict[str, list[str | None]] = {}
    for code in asked:
        for source, target in ((dominant, code), (code, dominant)) if code != dominant else ():

            def translate(source: str = source, target: str = target) -> list[dict[str, Any]]:
                texts = responses[source]
                rows = zip(ids, texts, model().translate(texts, target), strict=True)
                return [{"id": i, "response": r, "translation": t} for i, r, t in rows]

            path = folder / f"translations_{source}-{target}.jsonl"
            rows = _stage(path, translate, primary)
            _check_ids(path, rows, ids)
            translations[f"{source}->{target}"] = [row["translation"] for row in rows]
    return assemble(asked, ids, responses, translations)


def _check_ids(path: Path, rows: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> None:
    if [str(row["id"]) for row in rows] != [str(number) for number in ids]:
        raise ValueError(f"{path} was made for other prompts: remove it, or give another output folder.")


def _remember(path: Path, settings: Mapping[str, Any], primary: bool) -> None:
    """Refuse to go on with other settings than those that the folder was begun with."""
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if found.get(key) != value:
                raise ValueError(
                    f"{path.parent} was begun with {key}={found.get(key)!r}, now it is {value!r}: give another output "
                    "folder, or remove this one."
                )
    elif primary:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
        draft.replace(path)


def _barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def run_iterations(
    model_name_or_path: str,
    prompt_sets: list[dict[str, list[str]]],
    output_dir: str | Path,
    trainer_factory: Callable[[Path], Any] | None = None,
    data_factory: Callable[[Path, str], Any] | None = None,
    fit: Fit | None = None,
    ids: list[list[str]] | None = None,
    dominant: str = "en",
    dominant_pairs: Literal["one", "all", "last"] = "one",
    translation_instruction_ids: Collection[str] = (),
    drop_repetitive: bool = False,
    seed: int = 0,
    generator: Callable[[str], ResponseGenerator] | None = None,
    prompt_wrapper: Callable[[str, str], str] | None = None,
    module: Mapping[str, Any] | None = None,
) -> str:
    """Iterate the method: M_t answers, translates and is compared with itself, and becomes M_{t+1}.

    Each iteration begins with a fresh optimiser and schedule, and its reference is the model that made its pairs. All
    that is made is on disk, in ``<output_dir>/iteration_<t>/`` (answers and translations by language, ``pairs.jsonl``,
    checkpoints under ``fit/``) and ``<output_dir>/M<t+1>/`` (a folder that transformers reads), whole or not at all: a
    second call with the same arguments goes on where the first was interrupted.

    With several processes of ``torch.distributed`` (``torchrun``) the texts are shared in generation; a fit that starts
    its own processes (:class:`CommandLineFit`) is started by the first.

    Args:
        model_name_or_path: M_0.
        prompt_sets: parallel prompts by language, one set for each iteration; they should be disjoint.
        output_dir: where everything goes.
        trainer_factory: makes the Trainer of an iteration from the folder of its checkpoints; with it goes
            ``data_factory``.
        data_factory: makes the data module from the file of pairs and the folder of the model (its tokenizer), e.g.
            ``lambda pairs, model: PreferenceDataModule("jsonl", str(pairs), model, batch_size=16)``.
        fit: the optimisation of an iteration, instead of both factories.
        ids: of the prompts of each set; None numbers them on through the sets.
        dominant: code of the dominant language.
        dominant_pairs: see :func:`~lightning_methods.lidr.build_preference_pairs`.
        translation_instruction_ids: likewise.
        drop_repetitive: likewise.
        seed: of the draw of dominant pairs.
        generator: makes the generator from the folder of the model; None for :class:`ResponseGenerator` with its
            defaults.
        prompt_wrapper: what is made of a prompt before it is asked, ``(prompt, language) -> str``.
        module: arguments of :class:`~lightning_methods.lidr.LIDR` for the factories' fit.

    Returns:
        The folder of the last model.

    Raises:
        ValueError: neither the factories nor ``fit``, prompts that are not parallel, other settings than those that the
            folder was begun with, or an iteration without a pair.
    """
    if fit is None:
        if trainer_factory is None or data_factory is None:
            raise ValueError("give trainer_factory and data_factory, or fit.")
        fit = TrainerFit(trainer_factory, data_factory, dict(module or {}))
    if not prompt_sets:
        raise ValueError("prompt_sets must have one set of prompts for each iteration.")
    if ids is None:
        sizes = [len(next(iter(prompts.values()), [])) for prompts in prompt_sets]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        ids = [[str(start + k) for k in range(n)] for start, n in zip(starts, sizes, strict=True)]
    for prompts, numbers in zip(prompt_sets, ids, strict=True):
        check_parallel(prompts, numbers, dominant)
    output = Path(output_dir)
    primary = rank() == 0
    prints = [hashlib.sha256(json.dumps([p, n], sort_keys=True).encode()).hexdigest()[:16]
              for p, n in zip(prompt_sets, ids, strict=True)]  # fmt: skip
    settings = {"model": model_name_or_path, "dominant": dominant, "dominant_pairs": dominant_pairs, "seed": seed}
    _remember(output / "settings.json", settings, primary)
    _barrier()
    model = model_name_or_path
    for number, (prompts, names) in enumerate(zip(prompt_sets, ids, strict=True)):
        folder, target = output / f"iteration_{number}", output / f"M{number + 1}"
        _remember(folder / "prompts.json", {"digest": prints[number]}, primary)
        if not target.is_dir():
            records = make_records(
                lambda path=model: generator(path) if generator else ResponseGenerator(path),
                prompts,
                names,
                folder,
                dominant,
                prompt_wrapper,
            )
            if primary:
                pairs = build_preference_pairs(
                    records,
                    dominant,
                    [code for code in prompts if code != dominant],
                    translation_instruction_ids,
                    dominant_pairs,
                    seed,
                    drop_repetitive,
                )
                _write_pairs(folder, records, pairs)
            del records
            _release()
            _barrier()
            if primary or getattr(fit, "every_rank", False):
                fit(model, folder / "pairs.jsonl", folder / "fit", target)
            _barrier()
            if not target.is_dir():
                raise ValueError(f"the fit of iteration {number} ended without writing {target}.")
        model = str(target)
    return model


def _write_pairs(folder: Path, records: Sequence[ParallelRecord], pairs: Sequence[PreferencePair]) -> None:
    """Keep the pairs and say how many there are; a file that is there is that of the same records."""
    if not pairs:
        raise ValueError(
            f"not one of the {len(records)} prompts of {folder} gave a pair: every translation lacks its closing tag. "
            "Raise max_translation_tokens, or take a model that follows the request."
        )
    failed = sum(text is None for record in records for text in record.translations.values())
    total = sum(len(record.translations) for record in records)
    if failed > total / 2:
        warnings.warn(f"{failed} of {total} translations failed in {folder}.", stacklevel=3)
    if not (folder / "pairs.jsonl").is_file():
        write_jsonl(folder / "pairs.jsonl", [pair._asdict() for pair in pairs])


def _release() -> None:
    """Give the memory of the generator's model back before the fit."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# fits


class TrainerFit:
    """The fit of an iteration in this process, with a Trainer and a data module made for it.

    Args:
        trainer_factory: makes the Trainer from the folder of its checkpoints.
        data_factory: makes the data module from the file of pairs and the folder of the model.
        module: arguments of :class:`~lightning_methods.lidr.LIDR` besides the model.
    """

    every_rank = True

    def __init__(
        self,
        trainer_factory: Callable[[Path], Any],
        data_factory: Callable[[Path, str], Any],
        module: dict[str, Any] | None = None,
    ) -> None:
        self.trainer_factory = trainer_factory
        self.data_factory = data_factory
        self.module = module or {}

    def __call__(self, model: str, pairs: Path, folder: Path, save_to: Path) -> None:
        """Train and save; a checkpoint that an interrupted fit left is taken up."""
        from lightning.pytorch.callbacks import ModelCheckpoint

        from ..cli import find_checkpoint
        from .callbacks import PrecomputeReference, SavePretrained
        from .module import LIDR

        options = dict(self.module)
        data = self.data_factory(pairs, model)
        trainer = self.trainer_factory(folder)
        policy = LIDR(model, **options)
        if policy.reference_mode == "precomputed" and not any(
            isinstance(callback, PrecomputeReference) for callback in trainer.callbacks
        ):
            trainer.callbacks.append(PrecomputeReference())
        trainer.callbacks.append(SavePretrained(str(save_to), tokenizer=model))
        last = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
        trainer.callbacks.append(last)
        found = find_checkpoint(str(folder), "last")
        if rank() == 0 and found is None:
            folder.mkdir(parents=True, exist_ok=True)
        trainer.fit(policy, datamodule=data, ckpt_path=found, weights_only=True if found else None)
        if trainer.interrupted:
            raise KeyboardInterrupt("the fit was interrupted.")


class CommandLineFit:
    """The fit of an iteration by ``train.py fit`` with configurations, so that overlays, strategies and everything else
    of the command line apply.

    The configurations' ``model.init_args.model``, ``data.init_args.path`` and ``data.init_args.tokenizer`` are replaced
    by those of the iteration; the callback that writes the model is added. An interrupted fit is taken up.

    Args:
        configs: files that are stacked, e.g. ``["configs/lidr/alpagasus.yaml", "configs/trainer/fsdp.yaml"]``.
        arguments: further arguments of the command line.
        apart: run in a process of its own, which frees the memory of generation and starts its own ranks.
    """

    every_rank = False

    def __init__(self, configs: Sequence[str | Path], arguments: Sequence[str] = (), apart: bool = True) -> None:
        check_range("the number of configs", len(configs), 1)
        self.configs = [str(path) for path in configs]
        self.own = list(arguments)
        self.apart = apart

    def arguments(self, model: str, pairs: Path, folder: Path, save_to: Path) -> list[str]:
        """The arguments of the command."""
        from ..cli import find_checkpoint

        arguments = ["fit", *(part for path in self.configs for part in ("--config", path))]
        arguments += [
            f"--model.init_args.model={model}",
            "--data.init_args.source=jsonl",
            f"--data.init_args.path={pairs}",
            f"--data.init_args.tokenizer={model}",
            f"--trainer.default_root_dir={folder}",
            "--trainer.callbacks+=lightning_methods.lidr.SavePretrained",
            f"--trainer.callbacks.folder={save_to}",
            f"--trainer.callbacks.tokenizer={model}",
            *self.own,
        ]
        if find_checkpoint(str(folder), "last"):
            arguments.append("--ckpt_path=last")
        return arguments

    def __call__(self, model: str, pairs: Path, folder: Path, save_to: Path) -> None:
        """Run the command.

        Raises:
            RuntimeError: it failed.
        """
        arguments = self.arguments(model, pairs, folder, save_to)
        if not self.apart:
            from ..cli import run

            run(arguments)
            return
        mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
        others = ("GROUP_", "ROLE_", "TORCHELASTIC_")
        environment = {k: v for k, v in os.environ.items() if k not in mine and not k.startswith(others)}
        done = subprocess.run([sys.executable, "-m", "lightning_methods.cli", *arguments], env=environment, check=False)
        if done.returncode:
            shutil.rmtree(save_to, ignore_errors=True)
            raise RuntimeError(f"the fit ended with status {done.returncode}; its checkpoints are in {folder}.")
