"""The whole loop on a small bilingual world, from a model that was pretrained here in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.checks import check_choice, check_range
from ..text.generation import generate_text
from ..text.likelihood import token_log_probs
from ..text.models import load_model, load_tokenizer
from ..text.prompts import encode_pair, pad_batch
from ..text.tiny import tiny_causal_lm, word_tokenizer
from .data import ToyWorld
from .generate import ResponseGenerator
from .iterate import CommandLineFit, run_iterations

__all__ = ["answer_scores", "pretrain", "run"]

DOMINANT_KNOWN = 90  # of 96 facts
WEAK_KNOWN = 0.3


def pretrain(folder: str | Path, seed: int = 0, steps: int = 500, width: int = 48, lr: float = 3e-3) -> str:
    """Train a tiny GPT-2 on a world in which one language is told more about than the other, and save it.

    It reads nearly all facts in the dominant language, 30 % of them in the weaker one, and all words translated both
    ways; every step sees everything.

    Args:
        folder: where the model and its tokenizer go.
        seed: of the facts and the weights.
        steps: of AdamW.
        width: of the model, with two layers.
        lr: learning rate.

    Returns:
        The folder.
    """
    world = ToyWorld(seed=seed)
    tokenizer = word_tokenizer(world.words(), chat_template=None)
    model = tiny_causal_lm(tokenizer, width=width, layers=2, heads=4, positions=32, seed=seed).train()
    rows = [encode_pair(tokenizer, *text) for text in world.training_texts(DOMINANT_KNOWN, WEAK_KNOWN)]
    lengths = sorted({len(row) for row, _ in rows})  # facts and translations apart: no padding
    groups = [[row for row in rows if len(row[0]) == length] for length in lengths]
    batches = [(pad_batch([ids for ids, _ in group]), pad_batch([labels for _, labels in group])) for group in groups]
    scored = sum(int((labels != -100).sum()) for _, labels in batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        for ids, labels in batches:
            log_prob, _ = token_log_probs(model(input_ids=ids).logits, labels)
            (-log_prob.sum() / scored).backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def answer_scores(folder: str, world: ToyWorld) -> dict[str, float]:
    """How a model answers about all entities.

    Args:
        folder: of the model and its tokenizer.
        world: with the right answers.

    Returns:
        By language the share of right answers, ``acc_<language>``, and of answers with a word of the other language,
        ``off_target_<language>``.
    """
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    scores = {}
    for language, other in (world.languages, world.languages[::-1]):
        answers = generate_text(
            model, tokenizer, world.prompts(language), batch_size=len(world.facts), max_new_tokens=4
        )
        foreign = set(world.dictionary(other))
        right = [answer.strip() == gold for answer, gold in zip(answers, world.answers(language), strict=True)]
        away = [bool(foreign & set(answer.split())) for answer in answers]
        scores[f"acc_{language}"] = sum(right) / len(right)
        scores[f"off_target_{language}"] = sum(away) / len(away)
    return scores


def halves(world: ToyWorld, iterations: int) -> tuple[list[dict[str, list[str]]], list[list[str]]]:
    """The prompts of the iterations, disjoint, and their ids."""
    size = world.num_entities // iterations
    prompts = {language: world.prompts(language) for language in world.languages}
    slices = [range(i * size, (i + 1) * size) for i in range(iterations)]
    sets = [{language: [texts[k] for k in part] for language, texts in prompts.items()} for part in slices]
    return sets, [[str(k) for k in part] for part in slices]


def run(
    folder: str,
    seed: int = 0,
    model: str | None = None,
    fit: str | Sequence[str] = "configs/lidr/toy.yaml",
    arguments: Sequence[str] = (),
    iterations: int = 2,
    objective: str = "lidr",
) -> dict[str, Any]:
    """Pretrain, iterate, and score every model on the way.

    Args:
        folder: where everything goes.
        seed: of the world and all that follows.
        model: folder of a pretrained model of this world; None pretrains one into ``folder``.
        fit: configuration of the fits.
        arguments: further arguments of the fits' command line.
        iterations: rounds; each sees a part of the entities of its own.
        objective: "lidr"; "reversed" prefers what should be rejected; "pretrain" stops after the pretraining.

    Returns:
        ``m<t>/acc_en``, ``m<t>/acc_de``, ``m<t>/off_target_en`` and ``m<t>/off_target_de`` of the model after ``t``
        iterations, and ``checkpoint``: the folder of M_0.
    """
    check_choice("objective", objective, ("lidr", "reversed", "pretrain"))
    check_range("iterations", iterations, 1)
    world = ToyWorld(seed=seed)
    first = model or pretrain(Path(folder) / "M0", seed)
    folders = [first]
    if objective != "pretrain":
        sets, ids = halves(world, iterations)
        more = ["--data.init_args.swap=true"] if objective == "reversed" else []
        quiet = [
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            "--test_after_fit=false",
        ]
        stage = CommandLineFit(
            [fit] if isinstance(fit, str) else fit,
            [f"--seed_everything={seed}", "--test_after_fit=false", *quiet, *more, *arguments],
            apart=False,
        )
        run_iterations(
            first,
            sets,
            Path(folder) / "loop",
            fit=stage,
            ids=ids,
            seed=seed,
            generator=lambda path: ResponseGenerator(
                path,
                chat_template=False,
                max_new_tokens=4,
                max_translation_tokens=6,
                repetition_penalty=1.0,
                batch_size=world.num_entities,
                translation_prompt=world.translation_prompt,
            ),
        )
        folders += [str(Path(folder) / "loop" / f"M{number + 1}") for number in range(iterations)]
    scores: dict[str, Any] = {
        f"m{number}/{name}": value
        for number, path in enumerate(folders)
        for name, value in answer_scores(path, world).items()
    }
    return {**scores, "checkpoint": first}
