"""The regulariser for any module, and what a run is judged by: downstream scores and saliency maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from ..core.callbacks import LossPenalty
from ..core.checks import check_choice, check_range
from .functional import foci, saliency_map
from .modules import DifFOCIPenalty

__all__ = ["DifFOCIRegularizer", "DownstreamScore", "SaliencyMaps"]

_LABELS = ("y", "label", "target")


def _fields(batch: Any) -> str:
    if hasattr(batch, "_fields"):
        return f"the fields {', '.join(batch._fields)}"
    if isinstance(batch, dict):
        return f"the keys {', '.join(map(str, batch))}"
    return f"{len(batch)} entries without names" if isinstance(batch, (tuple, list)) else "no fields"


def batch_field(batch: Any, name: str | int) -> Tensor:
    """A part of a batch: a field by name, a key, or an entry by position.

    ``y``, ``label`` and ``target`` stand for each other and for the second entry of a plain tuple.

    Raises:
        ValueError: the batch has no such part; the message lists what it has.
    """
    names = (name, *_LABELS) if name in _LABELS else (name,)
    found = None
    if isinstance(name, int):
        found = batch[name] if isinstance(batch, (tuple, list)) and -len(batch) <= name < len(batch) else None
    elif isinstance(batch, dict):
        found = next((batch[key] for key in names if key in batch), None)
    elif hasattr(batch, "_fields") or not isinstance(batch, (tuple, list)):
        found = next((getattr(batch, key) for key in names if hasattr(batch, key)), None)
    elif name in _LABELS and len(batch) > 1:
        found = batch[1]
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the batch ({type(batch).__name__}) has no tensor {name!r}; it has {_fields(batch)}. Use a data "
            "module whose batches have it, or name another part by `attribute`: a field, or a position."
        )
    return found


class DifFOCIRegularizer(LossPenalty):
    """Add ``weight * T_{n,beta}(attribute, outputs of a layer)`` to the loss of any module with automatic optimisation.

    The module need not know of it. It makes the layer's outputs forget the attribute: a background, a sensitive column.
    Logs the coefficient as ``train/DifFOCIRegularizer``.

    Source: Lehman Pavasovic et al. (2025), difFOCI as a regulariser (dF2).

    Args:
        weight: factor of the coefficient.
        beta: temperature of the neighbours.
        layer: the submodule whose outputs are regularised, a name as in ``named_modules()``; [batch, ...] is flattened.
        attribute: where the batch has the attribute: a field or key by name, or a position. "y", "label" and "target"
            stand for each other and for the second entry of ``(x, y)``.
        ties: ranks of equal attributes, "max" or "ordinal".
        num_neighbors: softmax over the k nearest only.
        distance_scale: "mean" divides distances by their mean; use it with wide features and a beta of about 0.1.
        num_groups: number of values of a nominal attribute; more than 2 are compared one-hot. None: it is ordered.
        gather_distributed: take the coefficient over the batch of all ranks.

    Raises:
        ValueError: an option is out of range; during training: the batch has no such attribute, or no such layer.

    Example:
        >>> regularizer = DifFOCIRegularizer(weight=0.2, layer="network.features")
    """

    def __init__(
        self,
        weight: float = 0.1,
        beta: float = 0.2,
        layer: str = "backbone",
        attribute: str | int = "group",
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        num_groups: int | None = None,
        gather_distributed: bool = True,
    ) -> None:
        super().__init__(weight, layer)
        self.attribute = attribute
        self.coefficient = DifFOCIPenalty(
            beta, 1.0, ties, num_neighbors, distance_scale, gather_distributed, num_groups=num_groups
        )

    def penalty(self, outputs: Tensor, batch: Any) -> Tensor:
        """The coefficient of one batch, unweighted.

        Args:
            outputs: what the layer returned, [batch, ...].
            batch: the training batch.

        Raises:
            ValueError: the batch has no such attribute, or the layer returned something else than one tensor.
        """
        if not isinstance(outputs, Tensor):
            raise ValueError(f"layer {self.layer!r} must return one tensor, got {type(outputs).__name__}.")
        return self.coefficient(outputs, batch_field(batch, self.attribute))


# what a run is judged by


class DownstreamScore(Callback):
    """Test a learned selection or representation by what a standard model makes of it.

    After the test, a support vector regression (C=1, epsilon=0.2), or a logistic regression for classes, is fitted on
    ``module.transform(x)`` of the training set and scored on the test set: ``test/mse``, or ``test/acc`` and
    ``test/log_loss``. The same is done on what it is compared with, logged with a suffix: ``test/mse_inputs`` (all
    inputs), ``test/mse_foci`` (the variables that greedy FOCI selects), ``test/mse_pca`` (principal components). If the
    batches have a ``group`` of classes, ``test/leakage`` is the accuracy with which a logistic regression tells it from
    the features, and ``test/leakage_chance`` the share of its most frequent class.

    Args:
        compare: further features to score: "inputs", "foci", "pca".
        num_components: number of principal components.
        standardize: scale features to mean 0 and variance 1 with training statistics first.
        relevant: the variables that the target depends on; logs ``test/recall`` (the share of them that the module's
            ``selected_features()`` has) and ``test/false_selections``, and for FOCI ``test/recall_foci``.

    Raises:
        ValueError: unknown features; during the test: the module has no ``transform``, or there is no data module.
    """

    def __init__(
        self,
        compare: Sequence[Literal["inputs", "foci", "pca"]] = (),
        num_components: int = 3,
        standardize: bool = False,
        relevant: Sequence[int] = (),
    ) -> None:
        for name in compare:
            check_choice("compare", name, ("inputs", "foci", "pca"))
        check_range("num_components", num_components, 1)
        self.compare = tuple(compare)
        self.num_components = num_components
        self.standardize = standardize
        self.relevant = tuple(relevant)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit and score; every process does the same on the whole data."""
        data = trainer.datamodule
        if data is None or not hasattr(data, "train_eval_dataloader"):
            raise ValueError("DownstreamScore needs a data module with a `train_eval_dataloader`.")
        if not hasattr(pl_module, "transform"):
            raise ValueError(f"DownstreamScore needs a module with `transform`; {type(pl_module).__name__} has none.")
        train = _collect(data.train_eval_dataloader(), pl_module)
        test = _collect(data.test_dataloader(), pl_module)
        scores = self._score("", train, train["features"], test, test["features"])
        for name in self.compare:
            scores |= self._score(f"_{name}", train, *self._compared(name, train, test))
        if self.relevant:
            scores |= self._recall(pl_module, train)
        pl_module.log_dict(scores)

    def _compared(self, name: str, train: dict[str, Tensor], test: dict[str, Tensor]) -> tuple[Tensor, Any, Tensor]:
        """Training features, test set and test features of a method that is compared."""
        x, x_test = train["x"].flatten(1), test["x"].flatten(1)
        if name == "foci":
            chosen = foci(train["y"], x).indices
            x, x_test = x[:, chosen], x_test[:, chosen]
        elif name == "pca":
            from sklearn.decomposition import PCA

            pca = PCA(min(self.num_components, x.shape[1])).fit(x.numpy())
            x, x_test = torch.from_numpy(pca.transform(x.numpy())), torch.from_numpy(pca.transform(x_test.numpy()))
        return x, test, x_test

    def _score(
        self, suffix: str, train: dict[str, Tensor], z: Tensor, test: dict[str, Tensor], z_test: Tensor
    ) -> dict[str, float]:
        from sklearn.metrics import log_loss, mean_squared_error
        from sklearn.svm import SVR

        if z.shape[1] == 0:  # nothing selected: all a model can do is to predict a constant
            z, z_test = z.new_zeros(len(z), 1), z_test.new_zeros(len(z_test), 1)
        if self.standardize:
            mean, std = z.mean(dim=0), z.std(dim=0, correction=0)
            z, z_test = ((v - mean) / torch.where(std > 0, std, 1) for v in (z, z_test))
        a, b, y, y_test = (v.double().numpy() for v in (z, z_test, train["y"], test["y"]))
        if train["y"].is_floating_point():
            scores = {
                f"test/mse{suffix}": float(mean_squared_error(y_test, SVR(C=1, epsilon=0.2).fit(a, y).predict(b)))
            }
        else:
            model = _logistic(a, y)
            scores = {
                f"test/acc{suffix}": float(model.score(b, y_test)),
                f"test/log_loss{suffix}": float(log_loss(y_test, model.predict_proba(b), labels=model.classes_)),
            }
        group = train.get("group")
        if group is not None and group.dim() == 1 and not group.is_floating_point():
            groups = test["group"].numpy()
            scores[f"test/leakage{suffix}"] = float(_logistic(a, group.numpy()).score(b, groups))
            if not suffix:
                scores["test/leakage_chance"] = float(test["group"].bincount().max() / len(groups))
        return scores

    def _recall(self, module: LightningModule, train: dict[str, Tensor]) -> dict[str, float]:
        relevant, selected = set(self.relevant), set(module.selected_features().tolist())
        scores = {
            "test/recall": len(selected & relevant) / len(relevant),
            "test/false_selections": float(len(selected - relevant)),
        }
        if "foci" in self.compare:
            greedy = set(foci(train["y"], train["x"].flatten(1)).indices.tolist())
            scores["test/recall_foci"] = len(greedy & relevant) / len(relevant)
        return scores


def _logistic(z: Any, y: Any) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000).fit(z, y)


@torch.no_grad()
def _collect(loader: Any, module: Any) -> dict[str, Tensor]:
    """Inputs, features, targets and groups of a whole set, on the CPU."""
    parts: dict[str, list[Tensor]] = {}
    for batch in loader:
        x = batch_field(batch, "x") if hasattr(batch, "x") else batch[0]
        found = {"x": x, "features": module.transform(move_data_to_device(x, module.device)).cpu()}
        found["y"] = batch_field(batch, "y")
        if hasattr(batch, "group"):
            found["group"] = batch.group
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


class SaliencyMaps(Callback):
    """Save which pixels the predictions of the tested weights depend on, for the first images of the test.

    Writes ``saliency.pt`` into the run's folder: a dictionary of tensors with ``images`` [k, C, H, W], ``maps``
    [k, H, W] in [0, 1], ``predicted`` [k], and ``y`` and ``group`` [k] where the batch has them.

    Args:
        num_images: k, how many of the first test batch.
        folder: where to write; None is the log folder of the run.
    """

    def __init__(self, num_images: int = 32, folder: str | None = None) -> None:
        check_range("num_images", num_images, 1)
        self.num_images = num_images
        self.folder = folder

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Compute and save the maps of the first batch."""
        if batch_idx or dataloader_idx or not trainer.is_global_zero:
            return
        images = (batch.x if hasattr(batch, "x") else batch[0])[: self.num_images]
        with torch.inference_mode(False):  # the test runs in inference mode, in which nothing has a gradient
            images = images.clone()
            maps = saliency_map(pl_module, images)
            with torch.no_grad():
                predicted = pl_module(images).argmax(dim=1)
        saved = {"images": images, "maps": maps, "predicted": predicted}
        for name in ("y", "group"):
            if hasattr(batch, name):
                saved[name] = getattr(batch, name)[: self.num_images]
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.detach().cpu().clone() for name, value in saved.items()}, folder / "saliency.pt")
