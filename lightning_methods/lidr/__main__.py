"""The whole loop as one command: ``python -m lightning_methods.lidr --model ... --prompts ... --fit ... --output ...``.

Several GPUs share the generation under ``torchrun --nproc-per-node N -m lightning_methods.lidr ...``; the fits start
their own processes, as their configuration says.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        prog="python -m lightning_methods.lidr",
        description="Language Imbalance Driven Rewarding: a chat model answers, translates and prefers its own texts, "
        "and is trained on them; iterated. A run that was interrupted goes on when the command is given again.",
    )
    p.add_argument("--model", required=True, help="name or folder of the chat model")
    p.add_argument("--prompts", required=True, help="folder of <language>.jsonl with {id, instruction} in each line")
    p.add_argument("--languages", nargs="+", default=["en", "es", "ru", "de", "fr"], help="the dominant one and others")
    p.add_argument("--dominant", default="en")
    p.add_argument("--fit", nargs="+", required=True, metavar="YAML", help="configurations of the fit, stacked")
    p.add_argument("--output", required=True, help="folder for everything that is made")
    p.add_argument("--iterations", type=int, default=2)
    p.add_argument("--prompts_per_iteration", type=int, default=1000)
    p.add_argument("--arithmetic", action="store_true", help="name the language in each prompt and ask for it")
    p.add_argument("--translation_ids", help="file with the ids of prompts about translation, one a line")
    p.add_argument("--dominant_pairs", choices=("one", "all", "last"), default="one")
    p.add_argument("--drop_repetitive", action="store_true", help="leave out texts that run in circles")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--batch_size", type=int, default=16, help="prompts at a time in generation")
    p.add_argument("--max_new_tokens", type=int, default=2400)
    p.add_argument("--max_translation_tokens", type=int, default=4096)
    p.add_argument("--repetition_penalty", type=float, default=1.1)
    p.add_argument("--dtype", default=None, help="of the weights in generation, e.g. bfloat16")
    p.add_argument("--no_chat_template", action="store_true")
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further arguments of the fit, without --")
    p.add_argument("--in_process", action="store_true", help="fit in this process instead of one of its own")
    return p


def main(arguments: Sequence[str] | None = None, generator: Callable[[str], Any] | None = None) -> str:
    """Run the command.

    Args:
        arguments: those of the command line by default.
        generator: makes the generator from the folder of a model, instead of what the arguments say.

    Returns:
        The folder of the last model.
    """
    given = parser().parse_args(arguments)
    from .generate import ResponseGenerator
    from .iterate import CommandLineFit, read_prompts, run_iterations
    from .preference import language_prompt

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        # For texts only. The other ranks wait for whole fits.
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))
    if given.dominant not in given.languages:
        raise ValueError(f"--languages must contain the dominant language {given.dominant!r}.")
    files = {language: Path(given.prompts) / f"{language}.jsonl" for language in given.languages}
    sets, ids = read_prompts(files, given.prompts_per_iteration, given.iterations)
    about_translation = Path(given.translation_ids).read_text().split() if given.translation_ids else ()

    def own_generator(model: str) -> ResponseGenerator:
        return ResponseGenerator(
            model,
            chat_template=not given.no_chat_template,
            max_new_tokens=given.max_new_tokens,
            repetition_penalty=given.repetition_penalty,
            batch_size=given.batch_size,
            max_translation_tokens=given.max_translation_tokens,
            dtype=given.dtype,
        )

    last = run_iterations(
        given.model,
        sets,
        given.output,
        fit=CommandLineFit(given.fit, [f"--{argument}" for argument in given.set], apart=not given.in_process),
        ids=ids,
        dominant=given.dominant,
        dominant_pairs=given.dominant_pairs,
        translation_instruction_ids=about_translation,
        drop_repetitive=given.drop_repetitive,
        seed=given.seed,
        generator=generator or own_generator,
        prompt_wrapper=language_prompt if given.arithmetic else None,
    )
    print(f"The last model: {last}")
    return last


if __name__ == "__main__":
    main()
