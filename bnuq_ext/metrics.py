"""Scores of predicted probabilities: pure functions, evaluated in float64.

N rows, K classes, T replicas; entropies and likelihoods in nats. With `reduction="none"` a function returns
its value per row, with `"mean"` (the default) the mean over the rows.
"""

import torch
from torch import Tensor

from .ops.checks import check_floating, check_shape, refuse


def _probs(op: str, probs: Tensor, form: str) -> Tensor:
    check_floating(op, "probs", probs)
    if probs.dim() < form.count(",") + 1:
        refuse(op, "probs", f"have shape {form}", list(probs.shape))
    return probs.double()


def _labels(op: str, y: Tensor, probs: Tensor) -> Tensor:
    """The labels (N, *) of probabilities or logits (N, K, *), as int64 on their device."""
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
        refuse(op, "y", "be a tensor of integer labels", getattr(y, "dtype", type(y)), TypeError)
    check_shape(op, "y", y, (probs.shape[0], *probs.shape[2:]))
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        refuse(op, "y", f"lie in [0, {probs.shape[1]})", [int(y.min()), int(y.max())])
    return y.to(probs.device, torch.int64)


def _reduce(op: str, values: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "none"):
        refuse(op, "reduction", 'be "mean" or "none"', repr(reduction))
    return values.mean() if reduction == "mean" else values


def nll(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of the labels, -log p[n, y_n].

    Args:
        probs: (N, K, *) probabilities, normalised over dim 1.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64; a probability of zero gives inf.
    """
    probs = _probs("nll", probs, "(N, K)")
    y = _labels("nll", y, probs)
    return _reduce("nll", -probs.gather(1, y.unsqueeze(1)).squeeze(1).log(), reduction)


def accuracy(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Whether the most probable class is the label, 1[argmax_k p[n, k] = y_n].

    Args:
        probs: (N, K, *) probabilities or logits.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *), float64.
    """
    probs = _probs("accuracy", probs, "(N, K)")
    return _reduce(
        "accuracy", (probs.argmax(1) == _labels("accuracy", y, probs)).double(), reduction
    )


def ece(probs: Tensor, y: Tensor, num_bins: int = 15) -> Tensor:
    """Expected calibration error, sum_b (n_b / N) |accuracy_b - confidence_b|.

    Rows fall into `num_bins` bins of equal width, (lower, upper], by their largest probability
    (Guo et al. 2017, section 2).

    Args:
        probs: (N, K) probabilities, normalised over dim 1.
        y: (N,) integer labels in [0, K).
        num_bins: number of bins over [0, 1]; positive.

    Returns:
        () between 0 and 1, float64; nan without rows.
    """
    probs = _probs("ece", probs, "(N, K)")
    y = _labels("ece", y, probs)
    if num_bins < 1:
        refuse("ece", "num_bins", "be positive", num_bins)
    confidence, guess = probs.max(1)
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    gap = torch.zeros(num_bins, dtype=torch.float64, device=probs.device)
    gap.index_add_(0, bins, (guess == y).double() - confidence)
    return gap.abs().sum() / len(y)


def predictive_entropy(probs: Tensor, *, reduction: str = "mean") -> Tensor:
    """Entropy of the mean prediction, H[p̄] = -sum_k p̄_k log p̄_k with p̄ = mean_t p_t.

    Args:
        probs: (T, N, K, *) probabilities of each replica, normalised over dim 2.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64.
    """
    probs = _probs("predictive_entropy", probs, "(T, N, K)")
    mean = probs.mean(0)
    return _reduce("predictive_entropy", -torch.xlogy(mean, mean).sum(1), reduction)


def mutual_information(probs: Tensor, *, reduction: str = "mean") -> Tensor:
    """What the replicas disagree about, H[p̄] - mean_t H[p_t] = mean_t KL(p_t ‖ p̄) with p̄ = mean_t p_t.

    Evaluated in the second form with p̄ = p_0 + mean_t(p_t - p_0): equal replicas give exactly 0.

    Args:
        probs: (T, N, K, *) probabilities of each replica, normalised over dim 2.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64.
    """
    probs = _probs("mutual_information", probs, "(T, N, K)")
    mean = (probs[0] + (probs - probs[0]).mean(0)).clamp_min(0)
    divergence = (torch.xlogy(probs, probs) - torch.xlogy(probs, mean)).sum(2).mean(0)
    return _reduce("mutual_information", divergence, reduction)


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Probability that an outside score exceeds an inside one, P(out > in) + P(out = in) / 2.

    The area under the ROC curve with the outside data as the positive class.

    Args:
        scores_in: (N,) scores of data of the known kind.
        scores_out: (N',) scores of other data; higher means more foreign.

    Returns:
        () between 0 and 1, float64; 0.5 is chance, nan if either is empty.
    """
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        check_floating("auroc", name, scores)
        if scores.dim() != 1:
            refuse("auroc", name, "have one dimension", scores.dim())
    ordered = scores_in.double().sort().values
    outside = scores_out.double().to(ordered.device)
    below = torch.searchsorted(ordered, outside, side="left")
    not_above = torch.searchsorted(ordered, outside, side="right")
    return (below + not_above).double().mean() / (2 * len(ordered))


def fit_temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature with the least NLL of softmax(logits / temperature) (Guo et al. 2017, section 4.2).

    The NLL is convex in 1 / temperature, so its slope, mean_n(E_p[logits_n] - logits[n, y_n]), is bisected.

    Args:
        logits: (N, K) outputs for validation data, N > 0.
        y: (N,) integer labels in [0, K).

    Returns:
        the temperature, held in [0.01, 100] (labels that are all right have no finite optimum).
    """
    logits = _probs("fit_temperature", logits, "(N, K)")
    y = _labels("fit_temperature", y, logits)
    if len(y) == 0:
        refuse("fit_temperature", "logits", "have rows", list(logits.shape))
    target = logits.gather(1, y.unsqueeze(1)).mean()
    low, high = 0.01, 100.0
    for _ in range(60):
        inverse = (low * high) ** 0.5
        slope = ((logits * inverse).softmax(1) * logits).sum(1).mean() - target
        low, high = (inverse, high) if slope < 0 else (low, inverse)
    return 1 / (low * high) ** 0.5
