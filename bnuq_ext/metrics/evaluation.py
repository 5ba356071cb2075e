"""The scores that fit a prediction."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.checks import check_shape, check_tensor, check_within, refuse
from ..prediction import Prediction
from .arguments import label_log_probs, take_labels, take_numbers, take_targets
from .classification import accuracy, brier, ece, nll
from .regression import gaussian_crps, gaussian_nll, gaussian_pll, rmse


def evaluate(pred: Prediction, y: Tensor, ignore_index: int | None = None) -> dict[str, float]:
    """The mean over the data of each score that the prediction's likelihood has.

    Categorical: accuracy, nll, brier, ece (15 bins), entropy, mutual_information, of the mean
    probabilities; nll, if the replicas were kept, by their logits, to which no probability is 0.

    Gaussian: rmse of the mean, and crps of N(mean, variance + noise_var). A density needs a
    noise_var, positive everywhere: with one there is nll, of that Gaussian, and if the replicas
    were kept (`keep_samples=True`) pll, of their mixture. Without one both are left out, and the
    crps is that of the replicas' variance alone, which for one replica is the mean absolute error.
    rmse and crps are means over the outputs of a row, nll and pll sums.

    Args:
        pred: what `predict` or `Prediction.from_samples` returned.
        y: (N, *) integer labels, or targets of the shape of `pred.mean`, (N,) for (N, 1) too.
        ignore_index: a label that is left out, of pixels that nobody has labelled; categorical only.

    Returns:
        name -> value; nats, or for rmse and crps the unit of y. The mean of no labels is nan.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype or value.
    """
    if not isinstance(pred, Prediction):
        refuse("evaluate", "pred", "be a Prediction", type(pred).__name__, TypeError)
    check_tensor("evaluate", "y", y)
    if ignore_index is not None:
        check_within("evaluate", "ignore_index", ignore_index, -(2**63), 2**63, "[-2^63, 2^63)")
        if pred.likelihood != "categorical":
            refuse("evaluate", "ignore_index", 'be None with likelihood "gaussian"', ignore_index)
        pred, y = _labelled(pred, y, ignore_index)
    return (_categorical if pred.likelihood == "categorical" else _gaussian)(pred, y)


def _labelled(pred: Prediction, y: Tensor, ignored: int) -> tuple[Prediction, Tensor]:
    """The labels (N,) but the ignored ones, and the prediction there as one of N rows."""
    check_shape("evaluate", "y", y, (pred.mean.shape[0], *pred.mean.shape[2:]))
    y = y.to(pred.mean.device)
    # Not with a number, which torch would cast to the labels' type: -100 is 156 of uint8.
    kept = y != torch.full((1,), ignored, device=y.device)
    fields = {name: getattr(pred, name)[kept] for name in ("entropy", "mutual_information")}
    fields |= {name: getattr(pred, name).movedim(1, -1)[kept] for name in ("mean", "variance")}
    if pred.samples is not None:
        fields["samples"] = pred.samples.movedim(2, -1)[:, kept]
    return replace(pred, **fields), y[kept]


def _categorical(pred: Prediction, y: Tensor) -> dict[str, float]:
    y = take_labels("evaluate", y, pred.mean)
    scores = {"accuracy": accuracy(pred.mean, y)}
    kept = pred.samples is not None
    scores["nll"] = _nll_of_logits(pred.samples, y) if kept else nll(pred.mean, y)
    scores |= {score.__name__: score(pred.mean, y) for score in (brier, ece)}
    scores["entropy"] = pred.entropy.double().mean()
    scores["mutual_information"] = pred.mutual_information.double().mean()
    return {name: score.item() for name, score in scores.items()}


def _nll_of_logits(samples: Tensor, y: Tensor) -> Tensor:
    log_p = label_log_probs(samples, y)
    return (math.log(len(samples)) - log_p.logsumexp(0)).mean()


def _gaussian(pred: Prediction, y: Tensor) -> dict[str, float]:
    mean, std = pred.mean, pred.total_variance.double().sqrt()
    y = take_targets("evaluate", y, mean)
    scores = {"rmse": rmse(mean, y), "crps": gaussian_crps(mean, std, y)}
    noise = take_numbers("evaluate", "noise_var", 0.0 if pred.noise_var is None else pred.noise_var)
    if (noise > 0).all():
        scores["nll"] = gaussian_nll(mean, std, y)
        if pred.samples is not None:
            scores["pll"] = gaussian_pll(pred.samples, y, pred.noise_var)
    return {name: score.item() for name, score in scores.items()}
