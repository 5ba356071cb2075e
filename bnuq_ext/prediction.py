"""What T replicas say together: the result of `predict`, and how replicas are taken in."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .inputs import has_rows, move
from .ops import predictive_accumulate_, predictive_statistics
from .ops.channel_moments import channel_moments
from .ops.checks import (
    acc_dtype,
    broadcasts,
    check_floating,
    check_number,
    check_one_of,
    check_tensor,
    refuse,
)
from .ops.modes import has_values, is_captured
from .warn import warn

LIKELIHOODS = ("categorical", "gaussian")
_PER_ROW = ("mean", "variance", "entropy", "mutual_information")


@dataclass(eq=False)
class Prediction:
    """The predictive distribution of T replicas at N inputs.
    An attribute that does not apply is None.

    `pred[rows]` is that at some of the inputs, `pred.to(device)` that on another device; torch.save
    keeps one, and torch.load takes it where this package is imported.

    Attributes:
        likelihood: "categorical" or "gaussian".
        num_samples: T.
        mean: categorical (N, K, *), mean of the replicas' class probabilities; gaussian (N, ...),
            mean of their outputs; float32, or float64 for float64 outputs, as the other scores.
        variance: like mean, over the replicas, with 1/T.
        noise_var: variance of the observation noise as given to `predict`; gaussian only.
        entropy: (N, *) entropy of the mean probabilities, in nats; categorical only.
        mutual_information: (N, *) between class and replica, in nats: entropy minus the mean of the
            replicas' entropies, a difference that rounds by some eps (1 + ln K), held between 0 and
            sum_k variance_k / mean_k, which it never exceeds. Exactly 0 where it is below eps / 64
            (2e-9 in float32), as it is for replicas that differ by rounding alone.
        samples: (T, N, ...) raw outputs of the replicas, where kept.
        snapshots: (T,) int64, row of the bank that each replica used; sampler "bank" only, and not
            of `ensemble`, which has several.
        targets: what the loader gave beside the inputs: one tensor, or a list of one entry a batch.
    """

    likelihood: str
    num_samples: int
    mean: Tensor
    variance: Tensor
    noise_var: float | Tensor | None = None
    # "Any" stands for None, with which type checkers would object to every use.
    entropy: Tensor | Any = None
    mutual_information: Tensor | Any = None
    samples: Tensor | Any = None
    snapshots: Tensor | Any = None
    targets: Any = None

    def __post_init__(self):
        if isinstance(self.noise_var, Tensor):  # which may be a parameter that training moves on
            self.noise_var = self.noise_var.detach().clone()
        elif self.noise_var is not None:
            self.noise_var = float(self.noise_var)

    def __len__(self) -> int:
        """N, the number of inputs."""
        return len(self.mean)

    def __getitem__(self, rows) -> Prediction:
        """The prediction at some of the inputs.

        Args:
            rows: an index, a slice, a mask (N,), or a list or tensor of indices.

        Returns:
            a Prediction of copies with as many rows, one for an index; targets that are no tensor
            of N rows are left out.

        Raises:
            IndexError: as of a tensor of N rows.
        """
        device = rows.device if isinstance(rows, Tensor) else "cpu"
        chosen = torch.arange(len(self), device=device)[rows].reshape(-1)

        def of_rows(t: Tensor, dim: int = 0) -> Tensor:
            return t.index_select(dim, chosen.to(t.device))

        changed = {n: of_rows(v) for n in _PER_ROW if (v := getattr(self, n)) is not None}
        if self.samples is not None:
            changed["samples"] = of_rows(self.samples, 1)
        if isinstance(self.noise_var, Tensor):
            changed["noise_var"] = of_rows(self.noise_var.expand(self.mean.shape))
        y = self.targets
        y = of_rows(y) if isinstance(y, Tensor) and has_rows(y, len(self)) else None
        return replace(self, **changed, targets=y)

    def to(self, device: torch.device | str) -> Prediction:
        """The prediction with its tensors on a device, targets too."""
        moved = {field.name: move(getattr(self, field.name), device) for field in fields(self)}
        return replace(self, **moved)

    @property
    def total_variance(self) -> Tensor | Any:
        """variance + noise_var, or variance where none was given, (N, ...); gaussian only."""
        if self.likelihood != "gaussian":
            return None
        return self.variance if self.noise_var is None else self.variance + self.noise_var

    def __repr__(self) -> str:
        shape = tuple(self.mean.shape)
        return f"Prediction({self.likelihood}, {self.num_samples} replicas, mean of shape {shape})"

    @classmethod
    def from_samples(
        cls, samples: Tensor, likelihood: str, noise_var: float | Tensor | None = None
    ) -> Prediction:
        """The prediction of replicas from anywhere: an ensemble, dropout, a loop of one's own.

        Args:
            samples: (T, N, K, *) logits, softmax over dim 2, or (T, N, ...) means; T at least 1,
                K at least 2.
            likelihood: "categorical" or "gaussian".
            noise_var: see `predict`.

        Returns:
            a Prediction with the samples, whose mean and variance are over dim 0.

        Raises:
            ValueError, TypeError: an argument has the wrong shape, value or dtype.
        """
        op = "Prediction.from_samples"
        check_likelihood(op, likelihood, noise_var)
        check_floating(op, "samples", samples)
        form = "(T, N, K, *)" if likelihood == "categorical" else "(T, N, ...)"
        if samples.dim() < (3 if likelihood == "categorical" else 2):
            refuse(op, "samples", f"have shape {form}", list(samples.shape))
        if samples.shape[0] < 1:
            refuse(op, "samples", "have at least 1 replica", list(samples.shape))
        if likelihood == "categorical" and samples.shape[2] < 2:
            refuse(op, "samples", "have at least 2 classes", list(samples.shape))
        with torch.no_grad():
            summary = summarise(op, likelihood, samples)
            if likelihood == "categorical":
                warn_of_probabilities(op, "samples", samples[0])
        check_noise_shape(op, noise_var, summary["mean"])
        return cls(likelihood, len(samples), noise_var=noise_var, samples=samples, **summary)


torch.serialization.add_safe_globals([Prediction])  # for torch.load, which unpickles no other class


def check_likelihood(op: str, likelihood, noise_var) -> None:
    """Checks a likelihood and its noise."""
    check_one_of(op, "likelihood", likelihood, LIKELIHOODS)
    if noise_var is None:
        return
    if likelihood != "gaussian":
        refuse(op, "noise_var", f'be None with likelihood "{likelihood}"', noise_var)
    if isinstance(noise_var, Tensor):
        check_tensor(op, "noise_var", noise_var)
        if noise_var.is_complex() or noise_var.dtype == torch.bool or noise_var.is_meta:
            got = f"{noise_var.dtype} on {noise_var.device}"
            refuse(op, "noise_var", "hold real numbers", got, TypeError)
        good = bool((noise_var >= 0).all() and noise_var.isfinite().all())
    else:
        check_number(op, "noise_var", noise_var, "a number or a tensor")
        good = isfinite(noise_var) and noise_var >= 0
    if not good:
        refuse(op, "noise_var", "be finite and not negative", noise_var)


def check_noise_shape(op: str, noise_var, mean: Tensor) -> None:
    """Checks that the noise of `check_likelihood` has an entry for each of the means, or fewer."""
    if isinstance(noise_var, Tensor) and not broadcasts(noise_var.shape, mean.shape):
        requirement = f"broadcast to the shape {list(mean.shape)} of the mean"
        refuse(op, "noise_var", requirement, list(noise_var.shape))


def entropies(mean: Tensor, variance: Tensor, expected_entropy: Tensor) -> dict[str, Tensor]:
    """Entropy and mutual information of `Prediction`.

    Args:
        mean, variance: (N, K, *) of the replicas' probabilities.
        expected_entropy: (N, *) mean of the replicas' entropies, in nats.
    """
    entropy = torch.special.entr(mean).sum(1)
    information = _information(mean, variance, entropy, expected_entropy)
    return {"entropy": entropy, "mutual_information": information}


def _information(
    mean: Tensor, variance: Tensor, entropy: Tensor, expected_entropy: Tensor
) -> Tensor:
    """E_t[KL(p_t || mean)] as the difference of entropies, up to its bound by the chi-squared divergence,
    E_t[sum_k (p_tk - mean_k)^2 / mean_k]: of replicas that hardly differ that rounds far less."""
    # 0 / 0 is that of a class that no replica takes for possible.
    bound = (variance / mean).nansum(1)
    information = torch.minimum(entropy - expected_entropy, bound)
    return torch.threshold_(information, torch.finfo(mean.dtype).eps / 64, 0.0)


def check_logits(op: str, shape: torch.Size) -> None:
    """Checks that a replica's output of a shape can be the logits of classes."""
    if len(shape) < 2:
        requirement = "be logits (N, K, *) for a categorical likelihood"
        refuse(op, "the output", requirement, list(shape))
    if shape[1] < 2:  # the softmax of one is 1, whatever the network says
        requirement = "have at least 2 classes (of one logit z, output_fn can make [-z, z] / 2)"
        refuse(op, "the output", requirement, list(shape))


def warn_of_probabilities(op: str, name: str, logits: Tensor) -> bool:
    """Warns where a replica's logits (N, K, *) are probabilities, whose softmax is nearly uniform.
    Whether it could see: there may be no values, or none to be asked for."""
    if logits.numel() == 0 or logits.is_meta or not has_values(logits):
        return False
    if is_captured(logits.device):
        return False
    slack = max(1e-4, 8 * torch.finfo(logits.dtype).eps)
    sums = logits.sum(1, dtype=acc_dtype(logits.dtype))
    if ((sums - 1).abs() < slack).all() and (logits >= 0).all():
        warn(
            f"{op}: {name} look like probabilities (none is negative, over the classes they sum to 1), and "
            'likelihood "categorical" takes logits: give their logarithm (to predict by output_fn=torch.log)'
        )
    return True


class CategoricalMoments:
    """Running statistics of softmax(logits), one replica after another:
    the same under any chunking."""

    def __init__(self, op: str):
        self.op, self.count, self.mean = op, 0, None

    def add(self, logits: Tensor) -> None:
        """Takes in (T, N, K, *)."""
        check_logits(self.op, logits.shape[1:])
        if self.mean is None:
            shape, dtype = logits.shape[1:], acc_dtype(logits.dtype)
            self.expected_entropy = logits.new_zeros(shape[:1] + shape[2:], dtype=dtype)
            self.mean, self.m2 = logits.new_zeros((2, *shape), dtype=dtype)
        logits = logits.contiguous()
        predictive_accumulate_(self.mean, self.m2, self.expected_entropy, logits, self.count)
        self.count += len(logits)

    def summary(self) -> dict[str, Tensor]:
        count = self.m2.new_full((), self.count)  # by a number torch's GPU code multiplies by 1/T
        mean, variance = self.mean, self.m2 / count
        moments = {"mean": mean, "variance": variance}
        return moments | entropies(mean, variance, self.expected_entropy)


class GaussianMoments:
    """Running mean and sum of squared deviations (Chan, Golub and LeVeque, 1979), both from the
    first replica where that is finite: differences of numbers that are near do not round,
    however large the numbers are."""

    def __init__(self, op: str):
        self.op, self.count, self.origin, self.mean, self.m2 = op, 0, None, None, None

    def add(self, means: Tensor) -> None:
        """Takes in (T, N, ...)."""
        if means.dim() < 2:
            refuse(self.op, "the output", "have rows (N, ...)", list(means.shape[1:]))
        count, total = len(means), self.count + len(means)
        means = means.to(acc_dtype(means.dtype))
        if self.origin is None:
            self.origin = means[0].nan_to_num(0, 0, 0)
        means = means - self.origin
        if means.numel():
            mean, var = (m.view(means.shape[1:]) for m in channel_moments(means.flatten(1)))
        else:  # torch warns of no values
            var = mean = means.sum(0)
        m2 = var * count
        if self.mean is not None:
            delta = mean - self.mean
            m2 += self.m2 + delta.square() * (self.count * count / total)
            mean = (self.mean * self.count + mean * count) / total  # of infinite ones too
        self.count, self.mean, self.m2 = total, mean, m2

    def summary(self) -> dict[str, Tensor]:
        return {"mean": self.origin + self.mean, "variance": self.m2 / self.count}


def make_moments(op: str, likelihood: str) -> CategoricalMoments | GaussianMoments:
    """Fresh running statistics for a likelihood."""
    return (CategoricalMoments if likelihood == "categorical" else GaussianMoments)(op)


def summarise(op: str, likelihood: str, outputs: Tensor) -> dict[str, Tensor]:
    """What the running statistics give for all T replicas at once, (T, N, ...)."""
    if likelihood == "gaussian":
        moments = GaussianMoments(op)
        moments.add(outputs)
        return moments.summary()
    check_logits(op, outputs.shape[1:])
    mean, variance, entropy, expected_entropy = predictive_statistics(outputs)
    information = _information(mean, variance, entropy, expected_entropy)
    return {
        "mean": mean,
        "variance": variance,
        "entropy": entropy,
        "mutual_information": information,
    }
