"""Scores of class probabilities, and of what tells known inputs from foreign ones."""

import math

import torch
from torch import Tensor

from ..ops.checks import check_integer, refuse
from .arguments import (
    check_real,
    reduce,
    take_labels,
    take_logits,
    take_probs,
    take_replicas,
)


def nll(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of the labels, -log p[n, y_n] (Atanov et al. 2019, Table 1).

    Args:
        probs: (N, K, *) probabilities, normalised over dim 1.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64; a probability of zero gives inf.
    """
    probs = take_probs("nll", probs)
    return reduce("nll", -_log_likelihood("nll", probs, y), reduction)


def categorical_pll(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Predictive log-likelihood of T replicas, log 1/T sum_t p[t, n, y_n].

    The log of the mean, not the mean of the logs; so it is -nll of the mean probabilities
    (Teye et al. 2018, section 4.1).

    Args:
        probs: (T, N, K, *) probabilities of each replica, or (N, K, *) their mean; normalised over
            the classes. The labels tell which.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64; higher is better; a probability of zero gives -inf.
    """
    op = "categorical_pll"
    stacked = getattr(probs, "ndim", 0) == getattr(y, "ndim", math.nan) + 2
    mean = take_replicas(op, probs).mean(0) if stacked else take_probs(op, probs)
    return reduce(op, _log_likelihood(op, mean, y), reduction)


def _log_likelihood(op: str, probs: Tensor, y: Tensor) -> Tensor:
    """log p[n, y_n]; nan where another class is."""
    y = take_labels(op, y, probs)
    return probs.gather(1, y.unsqueeze(1)).squeeze(1).log() + 0 * probs.sum(1)


def brier(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Brier score, sum_k (p[n, k] - 1[k = y_n])²: the sum over the classes, between 0 and 2.

    As Brier (1950) has it; halves and means over the classes are in use, too.

    Args:
        probs: (N, K, *) probabilities, normalised over dim 1.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *), float64; lower is better.
    """
    probs = take_probs("brier", probs)
    y = take_labels("brier", y, probs).unsqueeze(1)
    hit = torch.zeros_like(probs).scatter_(1, y, 1.0)
    return reduce("brier", (probs - hit).square().sum(1), reduction)


def accuracy(probs: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Whether the most probable class is the label, 1[argmax_k p[n, k] = y_n].

    With the mean probabilities of the replicas it is the accuracy of Mukhoti et al.
    (2020), Table 1.

    Args:
        probs: (N, K, *) probabilities or logits.
        y: (N, *) integer labels in [0, K).
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *), float64; nan of a row with a nan.
    """
    probs = take_logits("accuracy", "probs", probs)
    right = (probs.argmax(1) == take_labels("accuracy", y, probs)).double()
    return reduce("accuracy", torch.where(probs.isnan().any(1), math.nan, right), reduction)


def ece(probs: Tensor, y: Tensor, num_bins: int = 15) -> Tensor:
    """Expected calibration error, sum_b (n_b / N) |accuracy_b - confidence_b|.

    Rows fall into `num_bins` bins of equal width, (lower, upper], by their largest probability
    (Guo et al. 2017, section 2). A pixel counts as a row.

    Args:
        probs: (N, K, *) probabilities, normalised over dim 1.
        y: (N, *) integer labels in [0, K).
        num_bins: number of bins over [0, 1]; positive.

    Returns:
        () between 0 and 1, float64; nan without rows.
    """
    probs = take_probs("ece", probs)
    y = take_labels("ece", y, probs)
    num_bins = check_integer("ece", "num_bins", num_bins, 1)
    confidence, guess = probs.max(1)
    bins = bins_of(confidence, num_bins)
    gap = torch.zeros(num_bins, dtype=torch.float64, device=probs.device)
    gap.index_add_(0, bins.flatten(), ((guess == y).double() - confidence).flatten())
    return gap.abs().sum() / y.numel()


def bins_of(confidence: Tensor, num_bins: int) -> Tensor:
    """The number b of the bin (b / num_bins, (b + 1) / num_bins] of each confidence;
    of 0 the first."""
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    return torch.bucketize(confidence, edges)


def predictive_entropy(probs: Tensor, *, reduction: str = "mean") -> Tensor:
    """Entropy of the mean prediction, H[p̄] = -sum_k p̄_k log p̄_k with p̄ = mean_t p_t.

    What tells unseen classes from known ones in Atanov et al. (2019).

    Args:
        probs: (T, N, K, *) probabilities of each replica, normalised over dim 2.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64.
    """
    probs = take_replicas("predictive_entropy", probs)
    mean = probs.mean(0)
    return reduce("predictive_entropy", torch.special.entr(mean).sum(1), reduction)


def mutual_information(probs: Tensor, *, reduction: str = "mean") -> Tensor:
    """What the replicas disagree about, H[p̄] - mean_t H[p_t] = mean_t KL(p_t ‖ p̄).

    Here p̄ = mean_t p_t. Evaluated in the second form with p̄ = p_0 + mean_t(p_t - p_0): equal
    replicas give exactly 0. The epistemic part of the entropy (Houlsby et al. 2011;
    Mukhoti et al. 2020, section 3, for the statistics of batch norm).

    Args:
        probs: (T, N, K, *) probabilities of each replica, normalised over dim 2.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N, *) in nats, float64.
    """
    probs = take_replicas("mutual_information", probs)
    mean = probs[0] + (probs - probs[0]).mean(0)
    positive = probs > 0  # the gradient of 0 log 0 would be nan
    own, shared = (torch.where(positive, p, 1.0) for p in (probs, mean))
    shared = shared.clamp(min=math.ulp(0.0))  # of numbers that hardly are any it rounds to 0
    divergence = (torch.xlogy(probs, own) - torch.xlogy(probs, shared)).sum(2).mean(0)
    return reduce("mutual_information", divergence, reduction)


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Probability that an outside score exceeds an inside one, P(out > in) + P(out = in) / 2.

    The area under the ROC curve with the outside data as the positive class (Hanley and McNeil
    1982).

    Args:
        scores_in: (N,) scores of data of the known kind, integers too.
        scores_out: (N',) scores of other data; higher means more foreign.

    Returns:
        () between 0 and 1, float64; 0.5 is chance, nan if either is empty or has a nan.
    """
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        check_real("auroc", name, scores)
        if scores.dim() != 1:
            refuse("auroc", name, "have one dimension", scores.dim())
    ordered = scores_in.double().sort().values
    outside = scores_out.double().to(ordered.device)
    if ordered.isnan().any() or outside.isnan().any():
        return ordered.new_tensor(torch.nan)
    below = torch.searchsorted(ordered, outside, side="left")
    not_above = torch.searchsorted(ordered, outside, side="right")
    return (below + not_above).double().mean() / (2 * len(ordered))
