"""The reference's log-probabilities before the first step, and the trained model as a folder at the end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ..core.checks import check_range
from ..core.distributed import gather, rank, world_size
from ..text.models import load_tokenizer

__all__ = ["PrecomputeReference", "SavePretrained"]

SPLITS = ("train", "val", "test")


class PrecomputeReference(Callback):
    """Ask the model, before it is trained, for the log-probabilities of all answers, and keep no second model.

    For ``LIDR(reference_mode="precomputed")`` with a data module whose ``pair_sets()`` gives its sets of pairs, as
    :class:`~datamodules.PreferenceDataModule` does. One pass without gradient over all pairs when the fit starts,
    shared by the ranks. The values are in the checkpoints, so that a resumed run goes on with those of the model at the
    start, not with those of the half-trained one.

    Args:
        batch_size: pairs at a time; None for that of the data module's evaluation.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        if batch_size is not None:
            check_range("batch_size", batch_size, 1)
        self.batch_size = batch_size
        self.values: dict[str, Tensor] = {}
        self._restored = False

    def state_dict(self) -> dict[str, Any]:
        """The values, [pairs, 2] by set."""
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values of a checkpoint."""
        self.values = dict(state_dict)
        self._restored = bool(state_dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute, or take the checkpoint's values, and hand them to the data module.

        Raises:
            ValueError: the module does not want them, there is no data module with pairs, or a resumed run has others.
        """
        if getattr(pl_module, "reference_mode", None) != "precomputed":
            raise ValueError("PrecomputeReference is for LIDR(reference_mode='precomputed').")
        sets = _pair_sets(trainer)
        if not self._restored:
            size = self.batch_size or trainer.datamodule.eval_batch_size or trainer.datamodule.batch_size
            self.values = {name: self._compute(trainer, pl_module, pairs, size) for name, pairs in sets.items()}
        self._restored = False
        self._hand_over(sets)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand the values of the fit to a data module that does not have them."""
        if self.values:
            self._hand_over(_pair_sets(trainer))

    def _hand_over(self, sets: dict[str, Any]) -> None:
        for name, pairs in sets.items():
            values = self.values.get(name)
            known = 0 if values is None else len(values)
            if known != len(pairs):
                raise ValueError(
                    f"the {name} set has {len(pairs)} pairs, the checkpoint has the reference's values of {known}: "
                    "a run goes on with the data it began with."
                )
            pairs.set_reference(values[:, 0], values[:, 1])

    @torch.no_grad()
    def _compute(self, trainer: Trainer, pl_module: LightningModule, pairs: Any, size: int | None) -> Tensor:
        rows = list(range(rank(), len(pairs), world_size()))
        size = size or max(len(rows), 1)
        longest = len(range(0, len(pairs), world_size()))  # all ranks make as many passes, sharded models need it
        parts = []
        for first in range(0, longest, size):
            mine = rows[first : first + size]
            batch = trainer.strategy.batch_to_device(pairs.__getitems__(mine or [0]), pl_module.device)
            with trainer.precision_plugin.forward_context():
                chosen, rejected, _ = self._ask(trainer, pl_module, batch)
            parts.append(torch.stack([chosen, rejected], dim=1)[: len(mine)])
        local = torch.cat(parts) if parts else torch.zeros(0, 2, device=pl_module.device)
        everything = gather(local.float(), grad=False)
        order = torch.cat([torch.arange(r, len(pairs), world_size()) for r in range(world_size())])
        result = torch.empty(len(pairs), 2)
        result[order] = everything.cpu()
        return result

    @staticmethod
    def _ask(trainer: Trainer, pl_module: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Through the strategy's wrapper, which gathers the parameters of a sharded model."""
        wrapper = trainer.strategy.model
        if wrapper is None or wrapper is pl_module:
            return pl_module.log_probs(pl_module.model, batch)
        return trainer.strategy._forward_redirection(wrapper, pl_module, "policy_log_probs", batch)


def _pair_sets(trainer: Trainer) -> dict[str, Any]:
    data = getattr(trainer, "datamodule", None)
    if not hasattr(data, "pair_sets"):
        raise ValueError("PrecomputeReference needs a data module with pairs, such as PreferenceDataModule.")
    return data.pair_sets()


class SavePretrained(Callback):
    """Write the trained model, adapters merged, with its tokenizer to a folder that transformers reads.

    For a module with the attribute ``model``; sharded models are gathered on the first rank. The folder appears whole
    or not at all.

    Args:
        folder: where to.
        tokenizer: name or folder of the tokenizer; None takes the data module's, if it has one.
    """

    def __init__(self, folder: str, tokenizer: str | None = None) -> None:
        self.folder = str(folder)
        self.tokenizer = tokenizer

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folder, unless the fit was interrupted."""
        if trainer.interrupted or trainer.fast_dev_run:
            return
        state = _full_state(trainer, pl_module)
        if trainer.is_global_zero:
            target = Path(self.folder)
            draft = target.with_name(f".{target.name}.part")
            shutil.rmtree(draft, ignore_errors=True)
            _plain_model(pl_module, state).save_pretrained(draft)
            tokenizer = self.tokenizer or getattr(trainer.datamodule, "tokenizer", None)
            if tokenizer is not None:
                load_tokenizer(tokenizer).save_pretrained(draft)
            shutil.rmtree(target, ignore_errors=True)
            draft.replace(target)
        trainer.strategy.barrier()


def _full_state(trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor] | None:
    """The whole weights of a sharded model, on the first rank; None where the model is whole anyway."""
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if not isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trainer.strategy.model, options=options)
    names = [key.partition("model.")[2] for key in state if key.removeprefix("_forward_module.").startswith("model.")]
    values = [v for key, v in state.items() if key.removeprefix("_forward_module.").startswith("model.")]
    return dict(zip(names, values, strict=True))


def _plain_model(pl_module: Any, state: dict[str, Tensor] | None) -> nn.Module:
    """The model without adapters; built anew around the gathered weights where it is sharded."""
    if state is None:
        return pl_module.merged_model() if hasattr(pl_module, "merged_model") else pl_module.model
    network = pl_module.model
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    plain = type(base)(base.config).to(next(iter(state.values())).dtype)
    if pl_module.lora_rank is None:
        plain.load_state_dict(state, strict=False)  # a tied head is not in the state
        plain.tie_weights()
        return plain
    adapted = add_lora(plain, pl_module.lora_rank)
    adapted.load_state_dict(state, strict=False)
    return adapted.merge_and_unload()
