"""What a data loader yields when ``(x, y)`` does not suffice.

Modules read the fields by name, so any object with these attributes will do. Conventions: ``index`` is the row of the
(modified) training set and -1 in evaluation; a label or target of -1 is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CorrectnessBatch",
    "GroupBatch",
    "IndexedBatch",
    "MultiViewBatch",
    "PopTBatch",
    "PreferenceBatch",
    "SoftLabelBatch",
    "TwoViewBatch",
]


class IndexedBatch(NamedTuple):
    """Samples with their row in the training set.

    Attributes:
        x: inputs, [B, ...].
        y: targets, [B].
        index: row of the training set, int64 [B]; -1 in evaluation.
    """

    x: Tensor
    y: Tensor
    index: Tensor


class CorrectnessBatch(NamedTuple):
    """Pairs of a model and a question with the outcome.

    Attributes:
        model_ids: which model, int64 [B] in 0..M-1.
        question_embeddings: frozen text embedding of the question, float [B, D].
        labels: 1 where the model was right, else 0, int64 [B].
        question_ids: which question, int64 [B]; the same number for the same question in every split.
    """

    model_ids: Tensor
    question_embeddings: Tensor
    labels: Tensor
    question_ids: Tensor


class GroupBatch(NamedTuple):
    """Samples with an attribute besides the label.

    Attributes:
        x: inputs, [B, ...].
        y: targets, [B].
        group: int64 [B] (a group index), or float [B, s] (sensitive columns).
    """

    x: Tensor
    y: Tensor
    group: Tensor


class SoftLabelBatch(NamedTuple):
    """Samples with a stored soft label.

    Attributes:
        x: inputs, [B, ...].
        soft_labels: logits or probabilities of a teacher, float [B, C].
        target: hard labels, int64 [B].
    """

    x: Tensor
    soft_labels: Tensor
    target: Tensor


class TwoViewBatch(NamedTuple):
    """Two augmented draws of every image.

    Attributes:
        view1: float [B, C, H, W].
        view2: float [B, C, H, W].
        label: int64 [B], -1 where unknown.
        index: int64 [B], row of the training set, -1 where unknown.
    """

    view1: Tensor
    view2: Tensor
    label: Tensor
    index: Tensor = torch.tensor(-1)


class MultiViewBatch(NamedTuple):
    """A clean, a weakly and a strongly augmented draw of every image.

    Attributes:
        clean: float [B, C, H, W].
        weak: float [B, C, H, W].
        strong: float [B, C, H, W].
        target: int64 [B], -1 where unknown; never used in unsupervised training.
        index: int64 [B], row of the training set, -1 where unknown.
    """

    clean: Tensor
    weak: Tensor
    strong: Tensor
    target: Tensor
    index: Tensor


class PopTBatch(NamedTuple):
    """Populations of channels (electrodes) of different sizes, padded to the largest.

    Attributes:
        x: embeddings of the channels, float [B, S, d].
        coords: positions of the channels, int64 [B, S, 3].
        seq_id: ensemble of each channel, 0 or 1, int64 [B, S].
        pad_mask: True where a channel is padding, bool [B, S].
        label: float [B]; in pretraining 0 = consecutive ensembles, 1 = not.
        replace_label: int64 [B, S]: 1 replaced, 2 scored as genuine, 0 not scored; None outside of pretraining.
    """

    x: Tensor
    coords: Tensor
    seq_id: Tensor
    pad_mask: Tensor
    label: Tensor
    replace_label: Tensor | None = None


class PreferenceBatch(NamedTuple):
    """Pairs of answers to one prompt each, the preferred one and the other, encoded with the prompt and padded.

    Attributes:
        chosen_ids: prompt and preferred answer, int64 [B, Tc].
        chosen_mask: 1 where there is a token, int64 [B, Tc].
        chosen_labels: the token where it belongs to the answer, else -100, int64 [B, Tc].
        rejected_ids: prompt and rejected answer, int64 [B, Tr].
        rejected_mask: int64 [B, Tr].
        rejected_labels: int64 [B, Tr].
        reference_chosen: log-probability of the preferred answer under the reference, float [B]; None if not known.
        reference_rejected: of the rejected answer, float [B]; None if not known.
        language_ids: number of the pair's language, int64 [B]; None if not known.
    """

    chosen_ids: Tensor
    chosen_mask: Tensor
    chosen_labels: Tensor
    rejected_ids: Tensor
    rejected_mask: Tensor
    rejected_labels: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None
    language_ids: Tensor | None = None
