"""Direct preference optimisation with a likelihood term on the preferred answer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_floating, check_range, check_shape, values_visible
from ..core.losses import at_least_float32
from ..text.likelihood import token_log_probs

__all__ = ["LIDRLoss", "dpo_loss", "lidr_loss", "sequence_log_prob"]


class LIDRLoss(NamedTuple):
    """The loss of a batch of preference pairs and its parts.

    Attributes:
        loss: mean over the pairs of ``dpo + alpha * nll``, scalar.
        dpo: preference term of each pair, [B].
        nll: negative log-likelihood per token of each preferred answer, [B].
        reward_chosen: implicit reward beta (log pi - log ref) of the preferred answers, detached, [B].
        reward_rejected: the same of the other answers, detached, [B].
    """

    loss: Tensor
    dpo: Tensor
    nll: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor


def sequence_log_prob(
    logits: Float[Tensor, "batch length vocab"],
    labels: Int[Tensor, "batch length"],
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Log-probability of a response under a causal language model: the sum over its tokens.

    Args:
        logits: [batch, length, vocab]; position t scores the token at t + 1.
        labels: the token at each position of the response, ``ignore_index`` on prompt and padding, [batch, length].
        ignore_index: label of what is not part of the response.
        chunk_size: positions whose softmax is computed at a time, see
            :func:`~lightning_methods.text.token_log_probs`.

    Returns:
        ``(log_prob, length)``: the sum, float32 or wider, and the number of tokens, int64; [batch] each.

    Raises:
        ValueError: shapes do not fit, or a row has no response token after its first position.

    Example:
        >>> logits = torch.zeros(1, 4, 10)
        >>> log_prob, length = sequence_log_prob(logits, torch.tensor([[-100, -100, 3, 7]]))
        >>> round(log_prob.item(), 4), length.item()  # two tokens of probability 1/10
        (-4.6052, 2)
    """
    log_prob, valid = token_log_probs(logits, labels, ignore_index=ignore_index, chunk_size=chunk_size)
    length = valid.sum(dim=1)
    check_lengths("labels", length)
    return log_prob.sum(dim=1), length


def check_lengths(name: str, length: Tensor) -> None:
    """Raise a ``ValueError`` where a response has no token (on CPU tensors)."""
    if values_visible(length) and (length < 1).any():
        rows = (length < 1).nonzero().flatten().tolist()
        raise ValueError(f"{name}: every response needs at least one token, row {rows[0]} has none.")


def dpo_loss(
    policy_chosen: Float[Tensor, " batch"],
    policy_rejected: Float[Tensor, " batch"],
    reference_chosen: Float[Tensor, " batch"],
    reference_rejected: Float[Tensor, " batch"],
    beta: float = 0.1,
) -> Float[Tensor, " batch"]:
    """Direct preference optimisation: ``-log sigmoid(beta (r(chosen) - r(rejected)))`` with ``r = log pi - log ref``.

    Source: Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, equation (7).

    Args:
        policy_chosen: summed log-probabilities of the preferred answers under the trained model, [batch].
        policy_rejected: of the other answers, [batch].
        reference_chosen: of the preferred answers under the frozen reference, [batch].
        reference_rejected: of the other answers, [batch].
        beta: strength of the pull towards the reference, > 0.

    Returns:
        The loss of each pair, [batch]; float32 or wider, linear in the margin where that is large and negative.

    Raises:
        ValueError: shapes differ, or beta is not positive.

    Example:
        >>> equal = torch.tensor([-10.0])
        >>> dpo_loss(equal, equal, equal, equal)
        tensor([0.6931])
    """
    check_range("beta", beta, 0, low_open=True)
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return F.softplus(-beta * (chosen - rejected))


def _log_ratios(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    batch = check_shape("policy_chosen", policy_chosen, "batch")["batch"]
    check_floating("policy_chosen", policy_chosen)
    others = {
        "policy_rejected": policy_rejected,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
    }
    for name, x in others.items():
        check_shape(name, x, "batch", batch=batch)
        check_floating(name, x)
    chosen = at_least_float32(policy_chosen) - at_least_float32(reference_chosen)
    rejected = at_least_float32(policy_rejected) - at_least_float32(reference_rejected)
    return chosen, rejected


def lidr_loss(
    policy_chosen: Float[Tensor, " batch"],
    policy_rejected: Float[Tensor, " batch"],
    reference_chosen: Float[Tensor, " batch"],
    reference_rejected: Float[Tensor, " batch"],
    chosen_length: Int[Tensor, " batch"],
    beta: float = 0.1,
    alpha: float = 1.0,
) -> LIDRLoss:
    """The objective of one iteration: preference between two answers, plus likelihood of the preferred one.

    ``mean_b [ dpo_b - alpha * log pi(chosen_b) / |chosen_b| ]``: the preference term sums log-probabilities over the
    tokens of an answer, the likelihood term averages them.

    Source: Yang et al., "Language Imbalance Driven Rewarding for Multilingual Self-improving", ICLR 2025.

    Args:
        policy_chosen: summed log-probabilities of the preferred answers under the trained model, [batch].
        policy_rejected: of the other answers, [batch].
        reference_chosen: of the preferred answers under the frozen reference, [batch].
        reference_rejected: of the other answers, [batch].
        chosen_length: number of tokens of the preferred answers, at least 1, int64 [batch].
        beta: of the preference term, > 0.
        alpha: weight of the likelihood term, >= 0; 0 is plain direct preference optimisation.

    Returns:
        The loss and its parts; the implicit rewards carry no gradient.

    Raises:
        ValueError: shapes differ, beta is not positive, alpha is negative, or a length is below 1.

    Example:
        >>> chosen, rejected = torch.tensor([-8.0]), torch.tensor([-12.0])
        >>> out = lidr_loss(chosen, rejected, torch.tensor([-9.0]), rejected, torch.tensor([4]))
        >>> round(out.nll.item(), 2), round(out.reward_chosen.item(), 2)
        (2.0, 0.1)
    """
    check_range("alpha", alpha, 0)
    dpo = dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta)
    check_shape("chosen_length", chosen_length, "batch", batch=policy_chosen.shape[0])
    check_lengths("chosen_length", chosen_length)
    nll = -at_least_float32(policy_chosen) / chosen_length
    with torch.no_grad():
        chosen, rejected = _log_ratios(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return LIDRLoss((dpo + alpha * nll).mean(), dpo, nll, beta * chosen, beta * rejected)
