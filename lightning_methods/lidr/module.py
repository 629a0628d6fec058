"""Preference optimisation of a causal language model, and supervised fine-tuning on the same pairs."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ..core.checks import check_choice, check_range, check_same_rows, check_shape
from ..core.module import MethodModule
from ..core.teacher import frozen_copy
from ..text.likelihood import token_log_probs
from ..text.models import add_lora, disable_dropout, load_model
from ..text.pooling import position_ids
from .functional import LIDRLoss, check_lengths, lidr_loss

__all__ = ["LIDR", "MultilingualAlignment"]

REFERENCE_MODES = ("copy", "precomputed", "adapter_off")
STAGES = ("train", "val", "test")


class LIDR(MethodModule):
    """A causal language model trained on preference pairs by DPO plus the likelihood of the preferred answers.

    Source: Yang et al., "Language Imbalance Driven Rewarding for Multilingual Self-improving", ICLR 2025.

    One iteration of the method: the pairs come from the model itself (:func:`~lightning_methods.lidr.run_iterations`
    makes them and iterates), and the reference is the model as it was before this iteration. Dropout is off in both.

    Batches are :class:`~lightning_methods.core.PreferenceBatch`. Logs ``train/loss``, ``train/dpo_loss``,
    ``train/nll_loss``, ``train/reward_acc`` (share of pairs whose preferred answer has the higher implicit reward),
    ``train/reward_margin``, and the same under ``val/`` and ``test/``; with the names of the languages also
    ``val/reward_acc_<language>``. ``predict_step`` gives log pi(chosen) - log pi(rejected), [B].

    Args:
        model: a causal transformers model, or its name or folder; any module that takes ``input_ids`` and
            ``attention_mask`` and returns logits, or an object with ``logits``, will do.
        reference: the reference of "copy"; None for a copy of ``model``.
        reference_mode: where the reference's log-probabilities come from. "copy": a second, frozen model.
            "adapter_off": the model with its LoRA adapter switched off; no second model. "precomputed": the batch,
            filled by :class:`~lightning_methods.lidr.PrecomputeReference` before the first step.
        beta: of the preference term, > 0.
        alpha: weight of the likelihood term, >= 0; 0 is plain DPO.
        lora_rank: train a LoRA adapter of this rank instead of all weights (needs ``peft``).
        gradient_checkpointing: recompute the layers' activations in the backward pass.
        save_reference: whether checkpoints carry the reference. Without it, it is built anew from the arguments, so
            ``model`` (or ``reference``) has to give the same weights again, as a name or a folder does.
        languages: names of ``PreferenceBatch.language_ids``; None takes those of the data module.
        dtype: of the weights of a model that is given by name, e.g. "bfloat16"; None for float32.
        chunk_size: answer tokens whose softmax over the vocabulary is computed at a time; None for all.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range, or does not go with the reference mode.

    Example:
        >>> from lightning_methods.lidr import PreferenceBatch
        >>> from lightning_methods.text import tiny_causal_lm
        >>> module = LIDR(tiny_causal_lm(20))
        >>> ids, mask = torch.tensor([[7, 8, 9]]), torch.ones(1, 3, dtype=torch.long)
        >>> labels = torch.tensor([[-100, -100, 9]])
        >>> batch = PreferenceBatch(ids, mask, labels, ids, mask, labels)
        >>> round(module.losses(batch).dpo.item(), 4)  # equal answers: log 2
        0.6931
    """

    frozen: ClassVar[tuple[str, ...]] = ("reference",)
    logged: ClassVar[tuple[str, ...]] = ("loss", "dpo_loss", "nll_loss", "reward_acc", "reward_margin")

    def __init__(
        self,
        model: nn.Module | str,
        reference: nn.Module | str | None = None,
        reference_mode: Literal["copy", "precomputed", "adapter_off"] = "copy",
        beta: float = 0.1,
        alpha: float = 1.0,
        lora_rank: int | None = None,
        gradient_checkpointing: bool = False,
        save_reference: bool = False,
        languages: list[str] | None = None,
        dtype: str | None = None,
        chunk_size: int | None = 1024,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-7, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "step",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("reference_mode", reference_mode, REFERENCE_MODES)
        check_range("beta", beta, 0, low_open=True)
        check_range("alpha", alpha, 0)
        if chunk_size is not None:
            check_range("chunk_size", chunk_size, 1)
        if reference is not None and reference_mode != "copy":
            raise ValueError(f"a reference is given, but reference_mode={reference_mode!r} has no use for one.")
        if reference_mode == "adapter_off" and lora_rank is None:
            raise ValueError("reference_mode='adapter_off' needs a LoRA adapter to switch off: give lora_rank.")
        self.reference_mode = reference_mode
        self.beta = beta
        self.alpha = alpha
        self.lora_rank = lora_rank
        self.gradient_checkpointing = gradient_checkpointing
        self.languages = list(languages) if languages is not None else None
        self.chunk_size = chunk_size
        by_name = isinstance(model, str)
        model = disable_dropout(load_model(model, dtype=dtype))
        self.reference: nn.Module | None = None
        if reference_mode == "copy":
            self.reference = frozen_copy(model) if reference is None else load_model(reference, dtype=dtype)
            disable_dropout(self.reference)
        # Before the adapter and any wrapping by a strategy: a sharded model cannot be copied.
        self.model = self._prepare(model)
        self.checkpoint_excludes = () if save_reference else ("reference.",)
        if by_name and lora_rank is not None:  # the base is in its own files: a checkpoint carries the adapter alone
            self.checkpoint_excludes += tuple(
                f"model.{name}" for name, parameter in self.model.named_parameters() if not parameter.requires_grad
            )
        for stage in STAGES:
            setattr(self, f"{stage}_metrics", nn.ModuleDict({name: MeanMetric() for name in self.logged}))
        self._looked_at_a_batch = False
        self._named(self.languages)

    def _prepare(self, model: nn.Module) -> nn.Module:
        if self.lora_rank is not None:
            model = add_lora(model, self.lora_rank)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def _named(self, languages: list[str] | None) -> None:
        for stage in ("val", "test"):
            metrics = {name.replace(".", "_"): MeanMetric() for name in languages or ()}
            setattr(self, f"{stage}_languages", nn.ModuleDict(metrics).to(self.device))

    def setup(self, stage: str) -> None:
        """Take the names of the languages from the data module, unless they were given."""
        data = getattr(self.trainer, "datamodule", None)
        if self.languages is None and getattr(data, "languages", None):
            self._named(list(data.languages))

    # log-probabilities

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of the trained model, [B, T, V]."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return out if isinstance(out, Tensor) else out.logits

    def log_probs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of both answers under a model, in one forward pass over all of them.

        Args:
            model: the trained model or the reference.
            batch: a :class:`~lightning_methods.core.PreferenceBatch`.

        Returns:
            ``(chosen, rejected, chosen_length)``: sums over the answers' tokens [B] each, float32 or wider, and the
            number of tokens of the preferred answers.

        Raises:
            ValueError: the batch's fields do not fit together, or an answer has no token.
        """
        batch_size = _check_batch(batch)
        ids, mask, labels = (
            torch.cat([_widened(getattr(batch, f"{which}_{name}"), width, fill) for which in ("chosen", "rejected")])
            for width in [max(batch.chosen_ids.shape[1], batch.rejected_ids.shape[1])]
            for name, fill in (("ids", 0), ("mask", 0), ("labels", -100))
        )
        log_prob, length = response_log_probs(model, ids, mask, labels, self.chunk_size)
        if not self._looked_at_a_batch:  # later batches on an accelerator are not waited for
            check_lengths("the batch's labels", length.cpu())
            self._looked_at_a_batch = True
        else:
            check_lengths("the batch's labels", length)
        return log_prob[:batch_size], log_prob[batch_size:], length[:batch_size]

    def policy_log_probs(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`log_probs` of the trained model."""
        return self.log_probs(self.model, batch)

    def reference_log_probs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities of both answers under the reference, [B] each, without gradient.

        Raises:
            ValueError: they are to come from the batch, which has none.
        """
        if self.reference_mode == "precomputed":
            if batch.reference_chosen is None or batch.reference_rejected is None:
                raise ValueError(
                    "reference_mode='precomputed', but the batch's reference_chosen and reference_rejected are None: "
                    "add the callback PrecomputeReference, or fill them yourself."
                )
            return batch.reference_chosen, batch.reference_rejected
        adapter = self.model.disable_adapter() if self.reference_mode == "adapter_off" else contextlib.nullcontext()
        with torch.no_grad(), adapter:
            network = self.model if self.reference is None else self.reference
            return self.log_probs(network, batch)[:2]

    def losses(self, batch: Any) -> LIDRLoss:
        """The objective on a batch and its parts, see :func:`~lightning_methods.lidr.lidr_loss`.

        Args:
            batch: a :class:`~lightning_methods.core.PreferenceBatch`.
        """
        chosen, rejected, length = self.policy_log_probs(batch)
        return lidr_loss(chosen, rejected, *self.reference_log_probs(batch), length, self.beta, self.alpha)

    # the next iteration

    def merged_model(self) -> nn.Module:
        """The trained model as a plain transformers model: itself, or a copy with the adapter merged into it."""
        if self.lora_rank is None:
            return self.model
        return copy.deepcopy(self.model).merge_and_unload()

    def refresh_reference(self) -> None:
        """Make the present model the reference of what follows.

        For "copy" the reference takes its weights, and checkpoints carry the reference from now on: the arguments would
        no longer give it. For "adapter_off" the adapter is merged and a new one started: make a new optimiser. For
        "precomputed" nothing is stored here: :class:`~lightning_methods.lidr.PrecomputeReference` asks the model anew
        when the next fit starts.
        """
        if self.reference_mode == "copy":
            self.reference = frozen_copy(self.merged_model())
        elif self.reference_mode == "adapter_off":
            base = self.model.merge_and_unload()
            self.model = self._prepare(base.requires_grad_(True))
        self.checkpoint_excludes = ()

    # steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch of pairs."""
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log losses and rewards."""
        self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log losses and rewards."""
        self._step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """log pi(chosen) - log pi(rejected), [B]."""
        chosen, rejected, _ = self.policy_log_probs(batch)
        return chosen - rejected

    def measured(self, out: LIDRLoss) -> dict[str, Tensor]:
        """What is logged of a batch, one value for each pair, by name."""
        margin = out.reward_chosen - out.reward_rejected
        dpo, nll = out.dpo.detach(), out.nll.detach()
        values = (dpo + self.alpha * nll, dpo, nll, (margin > 0).float(), margin)
        return dict(zip(self.logged, values, strict=True))

    def _step(self, batch: Any, stage: str) -> Tensor:
        out = self.losses(batch)
        measured = self.measured(out)
        batch_size = len(batch.chosen_ids)
        options: dict[str, Any] = {"batch_size": batch_size, "on_epoch": True}
        for name, metric in getattr(self, f"{stage}_metrics").items():
            metric.update(measured[name])
            step = stage == "train" and name == "loss"
            self.log(f"{stage}/{name}", metric, prog_bar=name == "loss", on_step=step, **options)
        if stage != "train" and "reward_acc" in measured and batch.language_ids is not None:
            for number, (language, metric) in enumerate(getattr(self, f"{stage}_languages").items()):
                metric.update(measured["reward_acc"], weight=(batch.language_ids == number).float())
                self.log(f"{stage}/reward_acc_{language}", metric, on_step=False, **options)
        return out.loss


class MultilingualAlignment(LIDR):
    """The baseline: supervised fine-tuning on the preferred answers, that is the likelihood term alone.

    In the paper it sees the pairs of the non-dominant languages only (``PreferenceDataModule(languages=[...])``): their
    prompts with the translated dominant answers. Logs ``loss`` under ``train/``, ``val/`` and ``test/``.

    Args:
        model: as in :class:`LIDR`.
        lora_rank: as in :class:`LIDR`.
        gradient_checkpointing: as in :class:`LIDR`.
        dtype: as in :class:`LIDR`.
        chunk_size: as in :class:`LIDR`.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    logged: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(
        self,
        model: nn.Module | str,
        lora_rank: int | None = None,
        gradient_checkpointing: bool = False,
        dtype: str | None = None,
        chunk_size: int | None = 1024,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-7, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "step",
    ) -> None:
        super().__init__(
            model,
            reference_mode="precomputed",  # there is none
            lora_rank=lora_rank,
            gradient_checkpointing=gradient_checkpointing,
            dtype=dtype,
            chunk_size=chunk_size,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            lr_interval=lr_interval,
        )

    def losses(self, batch: Any) -> LIDRLoss:
        """The likelihood term; the parts that need a rejected answer are 0."""
        _check_batch(batch)
        log_prob, length = response_log_probs(
            self.model, batch.chosen_ids, batch.chosen_mask, batch.chosen_labels, self.chunk_size
        )
        check_lengths("the batch's labels", length)
        nll = -log_prob / length
        zero = torch.zeros_like(nll)
        return LIDRLoss(nll.mean(), zero, nll, zero, zero)

    def measured(self, out: LIDRLoss) -> dict[str, Tensor]:
        """The loss of each pair."""
        return {"loss": out.nll.detach()}


def _widened(x: Tensor, width: int, fill: int) -> Tensor:
    return nn.functional.pad(x, (0, width - x.shape[1]), value=fill)


def _check_batch(batch: Any) -> int:
    rows = check_same_rows(chosen_ids=batch.chosen_ids, rejected_ids=batch.rejected_ids)
    for which in ("chosen", "rejected"):
        sizes = check_shape(f"{which}_ids", getattr(batch, f"{which}_ids"), "batch tokens")
        for name in ("mask", "labels"):
            check_shape(f"{which}_{name}", getattr(batch, f"{which}_{name}"), "batch tokens", **sizes)
    for name in ("reference_chosen", "reference_rejected", "language_ids"):
        if getattr(batch, name) is not None:
            check_shape(name, getattr(batch, name), "batch", batch=rows)
    return rows


def response_log_probs(
    model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's answer under a causal language model, without logits of anything else.

    The hidden states of the positions that score an answer's token are picked before the output head, so that prompt
    and padding never become rows of vocabulary size.

    Args:
        model: a transformers model with or without an adapter, or any module that returns logits.
        ids: token ids, [N, T].
        mask: 1 where there is a token, [N, T].
        labels: the token where it belongs to the answer, else -100, [N, T].
        chunk_size: tokens whose softmax is computed at a time.

    Returns:
        ``(log_prob, length)``, [N] each; float32 or wider, and int64.
    """
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # position t scores the token at t + 1
    scored = targets != -100
    rows, columns = scored.nonzero(as_tuple=True)
    picked = False

    def pick(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal picked
        picked = True
        return (args[0][rows, columns][None], *args[1:])

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    hook = head.register_forward_pre_hook(pick) if head is not None else None
    try:
        out = model(input_ids=ids, attention_mask=mask, **_extras(model, mask))
    finally:
        if hook is not None:
            hook.remove()
    logits = out if isinstance(out, Tensor) else out.logits
    if not picked:
        logits = logits[rows, columns][None]
    values, _ = token_log_probs(logits, targets[rows, columns][None], shift=False, chunk_size=chunk_size)
    # Written to their places and summed, which is the same every time; adding by index is not on a GPU.
    grid = torch.zeros(scored.shape, dtype=values.dtype, device=values.device)
    return grid.index_put((rows, columns), values[0]).sum(dim=1), scored.sum(dim=1)


def _extras(model: nn.Module, mask: Tensor) -> dict[str, Any]:
    """What models with a cache and with positions take besides: no cache, and positions that skip padding."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(base.forward).parameters
    extras = {"use_cache": False, "position_ids": position_ids(mask)}
    return {name: value for name, value in extras.items() if name in accepted}
