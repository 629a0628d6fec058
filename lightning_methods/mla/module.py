"""Training towards neural collapse, and logit adjustment at evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.checks import check_choice, check_labels, check_range, check_shape
from ..core.distributed import gather, sum_over_ranks
from ..core.losses import at_least_float32, class_log_prior, logit_adjusted_cross_entropy
from ..core.modes import evaluating
from ..core.module import Classifier, MethodModule
from ..metrics.group import ShotAccuracy
from .functional import Adjustment, adjust, check_adjustment, search_strength
from .modules import ETFClassifier

__all__ = ["MLA"]

#: Gammas or taus that are tried where none are given: 0 to 2 in steps of 0.05.
STRENGTHS = tuple(step / 20 for step in range(41))
_NO_COUNTS = "MLA needs class_counts: give them, or a data module that has an attribute class_counts."


class MLA(MethodModule):
    """Classifier for long-tailed data: a fixed simplex classifier, and logit adjustment in eval mode only.

    Source: Hasegawa and Sato, "Multiplicative Logit Adjustment Approximates Neural-Collapse-Aware Decision Boundary
    Adjustment", ICLR 2025.

    Training is plain cross-entropy plus ``feature_regularization / 2 * |f|^2``, which with weight decay leads features
    to neural collapse; nothing is rebalanced. Validation, test and prediction adjust the logits by the training set's
    class counts. The adjustment costs nothing and can be changed after training by :meth:`set_adjustment`, its strength
    chosen on balanced validation data by :meth:`search_strength`.

    Batches are ``(x, y)``, or anything with the fields ``x`` and ``y``.

    Logs ``train/loss``, ``train/loss_ce``, ``train/loss_feature``, ``{val,test}/acc`` (the mean of the per-class
    accuracies, adjusted), ``{val,test}/acc_many``, ``_medium`` and ``_few`` (where there are such classes), and
    ``{val,test}/acc_unadjusted``.

    Args:
        backbone: returns features [B, num_features].
        num_features: D; at least ``num_classes`` for the simplex.
        num_classes: K.
        class_counts: training samples of each class; None takes ``trainer.datamodule.class_counts``.
        classifier: "etf", the fixed simplex, or "linear", a trained one.
        adjustment: "none", "multiplicative", "additive", or "one_vs_one" (K >= 3).
        gamma: strength of "multiplicative" and "one_vs_one"; 1/2 is the theory.
        tau: strength of "additive", and of the loss "logit_adjusted".
        use_feature_norms: whether "one_vs_one" takes the norms of the class means into account. They are measured on
            the training set without augmentation in the last epoch, before its checkpoint is written, or before a test
            that finds none; until then all count as equal.
        feature_regularization: factor lambda_f.
        many_threshold: classes with more training samples are "many"; the paper has 1000 for CIFAR-10, 500 for Helena.
        few_threshold: classes with fewer are "few"; 200 for CIFAR-10 and Helena.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        classifier_bias: whether the classifier has a bias, which is trained.
        loss: "cross_entropy", or "logit_adjusted": additive adjustment during training instead of after it.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range, or the additive adjustment is asked for in the loss and after it.

    Example:
        >>> from lightning_methods.nn import MLP
        >>> model = MLA(MLP(64, hidden=(32,)), num_features=32, num_classes=4, class_counts=[50, 20, 8, 3]).eval()
        >>> x = torch.randn(2, 64)
        >>> torch.allclose(model(x)[:, 3] / model.logits(x)[:, 3], torch.tensor((81 / 3) ** 0.5))
        True
    """

    class_counts: Tensor
    feature_norms: Tensor
    norms_known: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        num_features: int,
        num_classes: int,
        class_counts: list[int] | None = None,
        classifier: Literal["etf", "linear"] = "etf",
        adjustment: Literal["none", "multiplicative", "additive", "one_vs_one"] = "multiplicative",
        gamma: float = 0.5,
        tau: float = 1.0,
        use_feature_norms: bool = True,
        feature_regularization: float = 0.01,
        many_threshold: int = 100,
        few_threshold: int = 20,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        classifier_bias: bool = True,
        loss: Literal["cross_entropy", "logit_adjusted"] = "cross_entropy",
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("num_features", num_features, 1)
        check_range("num_classes", num_classes, 2)
        check_choice("classifier", classifier, ("etf", "linear"))
        check_choice("loss", loss, ("cross_entropy", "logit_adjusted"))
        check_range("gamma", gamma, 0)
        check_range("tau", tau, 0)
        check_range("feature_regularization", feature_regularization, 0)
        check_range("many_threshold", many_threshold, few_threshold)
        self.num_classes = num_classes
        self.loss = loss
        self.gamma = gamma
        self.tau = tau
        self._check(adjustment)
        self.adjustment = adjustment
        self.use_feature_norms = use_feature_norms
        self.feature_regularization = feature_regularization
        self.backbone = backbone
        self.classifier = (
            ETFClassifier(num_features, num_classes, classifier_bias)
            if classifier == "etf"
            else nn.Linear(num_features, num_classes, bias=classifier_bias)
        )
        self._counts_given = class_counts is not None
        if class_counts is not None:
            class_log_prior(class_counts, num_classes)  # checks
        # Zeros: not known yet. Norms of one are no norms.
        counts = torch.zeros(num_classes) if class_counts is None else torch.as_tensor(class_counts)
        self.register_buffer("class_counts", counts.detach().clone().long())
        self.register_buffer("feature_norms", torch.ones(num_classes))
        self.register_buffer("norms_known", torch.zeros((), dtype=torch.bool))
        for stage in ("val", "test"):
            for name in ("acc", "unadjusted"):
                metric = ShotAccuracy(self.class_counts, many_threshold, few_threshold)
                setattr(self, f"{stage}_{name}", metric)
        self._looked_at_a_batch = False
        self._looked_at_counts = False
        self._norms_step = -1  # the optimiser step after which the norms were measured

    # the adjustment

    @property
    def strength(self) -> float:
        """Strength of the present adjustment: tau or gamma."""
        return self.tau if self.adjustment == "additive" else self.gamma

    def _check(self, adjustment: str) -> None:
        check_adjustment(adjustment, self.gamma)
        if adjustment == "additive" and self.loss == "logit_adjusted":
            raise ValueError(
                "adjustment='additive' and loss='logit_adjusted' are two forms of one correction: choose one, e.g. "
                "adjustment='none' with this loss."
            )
        if adjustment == "one_vs_one":
            check_range("num_classes of one_vs_one", self.num_classes, 3)

    def set_adjustment(self, name: Adjustment, strength: float | None = None) -> None:
        """Adjust by something else from now on; checkpoints remember it.

        Args:
            name: "none", "multiplicative", "additive" or "one_vs_one".
            strength: tau of "additive", else gamma; None keeps what it was.

        Raises:
            ValueError: an unknown name, a negative strength, or "additive" for a model trained by "logit_adjusted".
        """
        self._check(name)
        if strength is not None:
            check_adjustment(name, strength)
            setattr(self, "tau" if name == "additive" else "gamma", float(strength))
        self.adjustment = name
        for key in ("adjustment", "gamma", "tau"):
            if key in self.hparams:
                self.hparams[key] = getattr(self, key)

    def search_strength(
        self, dataloader: Iterable[Any], strengths: Sequence[float] = STRENGTHS
    ) -> tuple[float, dict[float, float]]:
        """Set the present adjustment to the strength that does best on (balanced) validation data.

        Args:
            dataloader: batches of validation data, never of the test.
            strengths: what is tried.

        Returns:
            The strength, and the mean per-class accuracy of each.

        Raises:
            ValueError: there is no adjustment to set.
        """
        if self.adjustment == "none":
            raise ValueError("adjustment='none' has no strength; call set_adjustment first.")
        with evaluating(self):
            parts = [(at_least_float32(self.logits(x)), y) for x, y in self._batches(dataloader)]
        if not parts:
            raise ValueError("the data loader gave no batch.")
        logits, target = (gather(torch.cat(column), grad=False) for column in zip(*parts, strict=True))
        best, accuracy = search_strength(logits, target, self.class_counts, strengths, self.adjustment, self._norms)
        self.set_adjustment(self.adjustment, best)
        return best, dict(zip(strengths, accuracy.tolist(), strict=True))

    @property
    def _norms(self) -> Tensor | None:
        return self.feature_norms if self.use_feature_norms else None

    # what goes through the network

    def logits(self, x: Tensor) -> Tensor:
        """Unadjusted logits, [B, num_classes]."""
        return self.classifier(self.backbone(x))

    def scores(self, logits: Tensor) -> Tensor:
        """Adjusted logits, or the 1-vs-1 scores; their argmax is the prediction.

        Args:
            logits: unadjusted, [B, num_classes].

        Raises:
            ValueError: the class counts are not known yet.
        """
        if self.adjustment != "none" and not self._looked_at_counts:  # once: reading them waits for the device
            if not bool((self.class_counts > 0).all()):
                raise ValueError(_NO_COUNTS)
            self._looked_at_counts = True
        return adjust(self.adjustment, logits, self.class_counts, self.strength, self._norms)

    def forward(self, x: Tensor) -> Tensor:
        """Adjusted scores in eval mode, unadjusted logits in training mode, [B, num_classes]."""
        logits = self.logits(x)
        return logits if self.training else self.scores(logits)

    # class statistics

    def setup(self, stage: str) -> None:
        """Take the class counts from the data module where none were given."""
        known = bool((self.class_counts > 0).all())
        if self._counts_given or (known and stage != "fit"):
            return
        counts = getattr(getattr(self._trainer, "datamodule", None), "class_counts", None)
        if counts is None:
            if known:
                return
            raise ValueError(_NO_COUNTS)
        counts = torch.as_tensor(counts)
        class_log_prior(counts, self.num_classes)  # checks
        self.class_counts.copy_(counts)

    def _batches(self, dataloader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels on the module's device, inputs in the trainer's precision."""
        for batch in dataloader:
            if self._trainer is not None:
                batch = self._trainer.precision_plugin.convert_input(batch)
            x, y = Classifier.inputs_and_target(move_data_to_device(batch, self.device))
            yield x, y.long()

    def estimate_feature_norms(self, dataloader: Iterable[Any]) -> Tensor:
        """Measure ``|mu_k|``, the norm of the mean feature of each class, for "one_vs_one".

        In several processes every one calls it with its share (or all) of the samples.

        Args:
            dataloader: the training set, without augmentation.

        Returns:
            The norms, [num_classes]; they are kept in ``feature_norms`` and in checkpoints.

        Raises:
            ValueError: a class does not occur.
        """
        sums, counts = 0, 0
        with evaluating(self):
            for x, y in self._batches(dataloader):  # sums by batch: the features of a large set would not fit
                features = at_least_float32(self.backbone(x))
                zeros = features.new_zeros(self.num_classes, features.shape[1])
                sums = sums + zeros.index_add(0, y, features)
                counts = counts + torch.bincount(y, minlength=self.num_classes)
        if not isinstance(sums, Tensor):
            raise ValueError("the data loader gave no batch.")
        counts = sum_over_ranks(counts, grad=False)
        if not bool((counts > 0).all()):
            missing = int((counts == 0).nonzero()[0])
            raise ValueError(f"class {missing} does not occur in the data loader: its mean feature is not known.")
        means = sum_over_ranks(sums, grad=False) / counts[:, None]
        self.feature_norms.copy_(means.norm(dim=1))
        self.norms_known.fill_(True)
        return self.feature_norms

    def measure_feature_norms(self) -> None:
        """:meth:`estimate_feature_norms` on the trainer's training set; without augmentation where that is possible."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if hasattr(datamodule, "feature_dataloader"):
            self.estimate_feature_norms(datamodule.feature_dataloader())
        elif self.trainer.train_dataloader is not None:
            self.estimate_feature_norms(self.trainer.train_dataloader)
        self._norms_step = self.global_step

    def _wants_norms(self) -> bool:
        return self.adjustment == "one_vs_one" and self.use_feature_norms

    def on_fit_start(self) -> None:
        """Norms of an earlier training are not those of this one."""
        self.feature_norms.fill_(1)
        self.norms_known.fill_(False)
        self._norms_step = -1

    def on_train_epoch_end(self) -> None:
        """Measure the feature norms in the last epoch: its checkpoint is written after this."""
        trainer = self.trainer
        last = trainer.current_epoch + 1 == trainer.max_epochs or self.global_step == trainer.max_steps
        # Training loaders may leave samples of rare classes out: an error here would cost the checkpoint.
        complete = hasattr(getattr(trainer, "datamodule", None), "feature_dataloader")
        if self._wants_norms() and complete and (last or trainer.should_stop):
            self.measure_feature_norms()

    def on_fit_end(self) -> None:
        """Measure the feature norms where the last epoch has not done so."""
        if self._wants_norms() and self._norms_step != self.global_step:
            self.measure_feature_norms()

    # steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy and feature regularisation."""
        x, y = Classifier.inputs_and_target(batch)
        features = self.backbone(x)
        logits = self.classifier(features)
        self._look(logits, y)
        if self.loss == "logit_adjusted":
            ce = logit_adjusted_cross_entropy(logits, y, self.class_counts, self.tau)
        else:
            ce = F.cross_entropy(at_least_float32(logits), y)
        feature = self.feature_regularization / 2 * at_least_float32(features).square().sum(dim=1).mean()
        loss = ce + feature
        options = {"batch_size": len(y), "on_step": False, "on_epoch": True}
        self.log("train/loss", loss, prog_bar=True, **options)
        self.log("train/loss_ce", ce, **options)
        self.log("train/loss_feature", feature, **options)
        return loss

    def _look(self, logits: Tensor, y: Tensor) -> None:
        """Check the first batch; later ones are not waited for."""
        if not self._looked_at_a_batch:
            check_shape("the classifier's output", logits, "batch classes", classes=self.num_classes)
            check_labels("the batch's labels", y, self.num_classes, batch=len(logits), validate=True)
            self._looked_at_a_batch = True

    def _start(self, stage: str) -> None:
        for name in ("acc", "unadjusted"):
            getattr(self, f"{stage}_{name}").group_counts = self.class_counts

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = Classifier.inputs_and_target(batch)
        logits = self.logits(x)
        self._look(logits, y)
        getattr(self, f"{stage}_acc").update(self.scores(logits), y)
        getattr(self, f"{stage}_unadjusted").update(logits, y)

    def _finish(self, stage: str) -> None:
        metric, unadjusted = getattr(self, f"{stage}_acc"), getattr(self, f"{stage}_unadjusted")
        result = metric.compute()
        self.log(f"{stage}/acc", result["average"], prog_bar=True)
        self.log(f"{stage}/acc_unadjusted", unadjusted.compute()["average"])
        for name in ("many", "medium", "few"):
            if not torch.isnan(result[name]):  # no class of this kind: nothing to log
                self.log(f"{stage}/acc_{name}", result[name])
        metric.reset()
        unadjusted.reset()

    def on_validation_epoch_start(self) -> None:
        """Tell the metrics the class counts."""
        self._start("val")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count hits."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Log accuracies."""
        self._finish("val")

    def on_test_epoch_start(self) -> None:
        """Tell the metrics the class counts; measure the feature norms where a checkpoint lacks them."""
        self._start("test")
        if self._wants_norms() and not bool(self.norms_known):
            self.measure_feature_norms()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count hits."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log accuracies."""
        self._finish("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Adjusted scores, [B, num_classes]; the largest is the prediction. They are no probabilities."""
        x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(x)
