"""What `fit_batch_size` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class BatchSizeFit:
    """What `fit_batch_size` found for each of P batch sizes, float64; shown as a table.

    Attributes:
        batch_sizes: (P,) int64, ascending.
        log_likelihood: (P,) E_q log p(y | x, omega), summed over the training data, in nats.
        kl: (P,) divergence of the statistics from the prior, in nats; inf at M = N.
        nll: (P,) mean negative log predictive density of the validation data, in nats;
            None without it.
        mutual_information: (P,) between class and replica, mean over the inputs, in nats; None for
            "gaussian". Exactly 0 at M = N.
        epistemic_variance: (P,) variance over the replicas, mean over inputs and outputs (class
            probabilities, or means in the unit of y squared). Exactly 0 at M = N.
        left_out: channels without a divergence: constant over the rows
            of some batch size's every batch.
    """

    batch_sizes: Tensor
    log_likelihood: Tensor
    kl: Tensor
    nll: Tensor | Any  # for None, as in `Prediction`
    mutual_information: Tensor | Any
    epistemic_variance: Tensor
    left_out: int

    @property
    def elbo(self) -> Tensor:
        """(P,) log_likelihood - kl, in nats, up to the constants
        that an improper prior leaves out."""
        return self.log_likelihood - self.kl

    @property
    def best_by_elbo(self) -> int:
        """M with the greatest ELBO; the smallest of equals."""
        return int(self.batch_sizes[self.elbo.argmax()])

    @property
    def best_by_nll(self) -> int | None:
        """M with the least validation NLL; the smallest of equals."""
        return None if self.nll is None else int(self.batch_sizes[self.nll.argmin()])

    def __repr__(self) -> str:
        names = ("log_likelihood", "kl", "elbo", "nll", "mutual_information", "epistemic_variance")
        columns = {name: v.tolist() for name in names if (v := getattr(self, name)) is not None}
        lines = ["  ".join([f"{'M':>6}", *(f"{name:>12}" for name in columns)])]
        for row, M in enumerate(self.batch_sizes.tolist()):
            values = (f"{v[row]:{max(12, len(name))}.6g}" for name, v in columns.items())
            lines.append("  ".join([f"{M:6}", *values]))
        by_nll = "" if self.nll is None else f", by validation NLL {self.best_by_nll}"
        return "\n".join([*lines, f"best M by ELBO {self.best_by_elbo}{by_nll}"])
