"""Other ways to T samples of a Bayesian linear layer.

Every function takes x, (N, I) shared by the replicas or (T, N, I), a `Posterior` and T, and gives a
function of no arguments that returns (T, N, O), or a list of T times (N, O), with noise of its own.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .yardsticks import Unavailable, compiled, need_triton

Run = Callable[[], Tensor | list[Tensor]]


class Posterior(NamedTuple):
    mu: Tensor
    rho: Tensor
    bias_mu: Tensor
    bias_rho: Tensor


def _rows(x: Tensor, t: int) -> Tensor:
    return x if x.dim() == 2 else x[t]


def linear(x: Tensor, q: Posterior, T: int) -> Run:
    """nn.Linear T times: what a layer without noise costs."""
    layer = nn.utils.skip_init(nn.Linear, *q.mu.shape[::-1], device=x.device)
    layer.weight, layer.bias = nn.Parameter(q.mu.detach()), nn.Parameter(q.bias_mu.detach())
    run = lambda: [layer(_rows(x, t)) for t in range(T)]  # noqa: E731
    run.parameters = tuple(layer.parameters())
    return run


def stacked(x: Tensor, q: Posterior, T: int) -> Run:
    """All T weight matrices in memory, then one batched product."""

    def run():
        weight = q.mu + F.softplus(q.rho) * torch.randn(T, *q.mu.shape, device=x.device)
        bias = q.bias_mu + F.softplus(q.bias_rho) * torch.randn(T, len(q.bias_mu), device=x.device)
        xs = x.expand(T, *x.shape) if x.dim() == 2 else x
        return torch.baddbmm(bias[:, None], xs, weight.transpose(1, 2))

    return run


def local(x: Tensor, q: Posterior, T: int) -> Run:
    """Local reparameterisation: other noise, independent from row to row."""

    def run():
        mean = F.linear(x, q.mu, q.bias_mu)
        var = F.linear(x.square(), F.softplus(q.rho).square(), F.softplus(q.bias_rho).square())
        shape = (T, x.shape[-2], len(q.mu))
        return mean + var.sqrt() * torch.randn(shape, device=x.device)

    return run


def under_compile(make: Callable[..., Run]) -> Callable[..., Run]:
    return lambda x, q, T: compiled(torch.compile(make(x, q, T)))


def triton(x: Tensor, q: Posterior, T: int) -> Run:
    """tl.randn inside tl.dot; forward only."""
    need_triton()
    from .triton_bayes import bayes_linear

    return lambda: bayes_linear(x, q.mu, F.softplus(q.rho), q.bias_mu, T)


def _package(module: str, build: Callable) -> Callable[..., Run]:
    """A package's own layer, called once a replica; its initialisation,
    on which no time depends."""

    def yardstick(x, q, T):
        try:
            layer = build(import_module(module), *q.mu.shape[::-1]).to(x.device)
            layer(_rows(x, 0))
        except ImportError as error:
            raise Unavailable("not installed") from error
        except Exception as error:  # an installed package can be broken in any way
            raise Unavailable(f"does not load: {type(error).__name__}: {error}") from error

        def run():
            outputs = [layer(_rows(x, t)) for t in range(T)]
            return [y[0] if isinstance(y, tuple) else y for y in outputs]

        run.parameters = tuple(layer.parameters())
        return run

    return yardstick


class ByHand(nn.Module):
    """The layer as it is written by hand, a sample of the weights in each call."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        empty = lambda *shape: nn.Parameter(torch.zeros(shape))  # noqa: E731
        self.weight_mu, self.weight_rho = (empty(out_features, in_features) for _ in range(2))
        self.bias_mu, self.bias_rho = empty(out_features), empty(out_features)

    def forward(self, x: Tensor) -> Tensor:
        pairs = (self.weight_mu, self.weight_rho), (self.bias_mu, self.bias_rho)
        self.posterior = [(mu, F.softplus(rho)) for mu, rho in pairs]
        return F.linear(x, *[mu + sigma * torch.randn_like(sigma) for mu, sigma in self.posterior])

    def kl_divergence(self) -> Tensor:
        """From N(0, 1), of the last call's posterior."""
        terms = [sigma**2 + mu**2 - 1 - 2 * sigma.log() for mu, sigma in self.posterior]
        return sum(0.5 * term.sum() for term in terms)


PLAIN = {"nn.Linear x T": linear, "stacked": stacked, "local": local}
COMPILED = {f"compiled {name}": under_compile(make) for name, make in list(PLAIN.items())[:2]}
PACKAGES = {
    "bayesian-torch": _package(
        "bayesian_torch.layers", lambda m, i, o: m.LinearReparameterization(i, o)
    ),
    "blitz": _package("blitz.modules", lambda m, i, o: m.BayesianLinear(i, o)),
    "torchbnn": _package("torchbnn", lambda m, i, o: m.BayesLinear(0.0, 1.0, i, o)),
    "torch-uncertainty": _package(
        "torch_uncertainty.layers.bayesian", lambda m, i, o: m.BayesLinear(i, o)
    ),
}
