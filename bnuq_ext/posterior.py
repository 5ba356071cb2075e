"""From weights to distributions and back: to_bayesian, prune, posterior_summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .adapters import qualified_name
from .batch_norm_like import describe
from .bayes import DTYPES, BayesLinear, check_initial, check_whole, require_bayes_layers
from .convert import Model, copy_model
from .nn import check_model
from .ops.checks import check_callable, check_fraction, check_one_of, refuse
from .ops.formulas import log_sigma_of, sigma_of
from .priors import GaussianPrior, Prior, check_prior
from .restore import without_gradients
from .state import OF_EVERY_MODULE
from .warn import warn

RANKINGS = ("snr", "magnitude")
# timm's differs from torch's in TorchScript only.
_LINEAR = {"torch.nn.modules.linear.Linear", "timm.layers.linear.Linear"}


def to_bayesian(
    model: Model,
    filter_fn: Callable[[str, nn.Linear], bool] | None = None,
    rho_init: float | tuple[float, float] = -5.0,
    prior: Prior = GaussianPrior(1.0),  # noqa: B008 - immutable
) -> Model:
    """A copy of a trained model whose linear layers have a Gaussian around each of their weights.

    In eval() it returns what the model returned, until it is trained. Hooks, shared layers and
    shared weights stay: of two layers with one weight each has a spread, draws and a divergence of
    its own around the one mean (a layer that is itself shared has one of each). The mean of a
    frozen layer stays frozen, its spread does not. Layers that are called are sampled, and so are
    those of `torch.nn.TransformerEncoder`, whose fused path is switched off (which without
    gradients had put zeros where a padding mask is); attention's own projections are not among
    them. A model that reads the `weight` of a layer fails, for a Bayesian one has none; filter_fn
    can leave such a layer as it is. Inputs of the layers have to be dense.

    Args:
        model: holds `torch.nn.Linear` layers (that very class, or timm's `Linear`).
        filter_fn: (name, layer) -> whether to turn the layer; None turns all.
        rho_init: spread of every weight and bias before the softplus; -5 is a standard deviation of
            0.0067; (low, high) draws each from a uniform distribution.
        prior: see `BayesLinear`.

    Returns:
        the copy, with a warning where it has subclasses of `torch.nn.Linear` that filter_fn accepts too,
        which stay as they are; a `BayesLinear` where the model is itself a linear layer.

    Raises:
        ValueError, TypeError: copy.deepcopy refuses the model, it is wrapped in
            DistributedDataParallel, no linear layer is left to turn, or one has parameters of 16
            bits, none at all or none yet (lazy), a weight that is made of others (spectral norm,
            the older weight norm, pruning by torch; one with a parametrization is no nn.Linear and
            stays as it is), or a forward that is set on the object.
    """
    op = "to_bayesian"
    check_model(op, model)
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        requirement = "be wrapped afterwards (what is wrapped knows of no new parameters)"
        refuse(op, "model", requirement, "a DistributedDataParallel")
    check_callable(op, "filter_fn", filter_fn)
    check_initial(op, "rho_init", rho_init)
    check_prior(op, prior)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    # Subclasses, which no `BayesLinear` can stand for.
    others = {n: m for n, m in layers.items() if qualified_name(type(m)) not in _LINEAR}
    chosen = {
        layer: name
        for name, layer in layers.items()
        if (name not in others or type(layer) is nn.LazyLinear)
        and (filter_fn is None or filter_fn(name, layer))
    }
    if not chosen:
        got = f"none but subclasses of it: {_described(others)}" if others else "none"
        refuse(op, "model", "contain a torch.nn.Linear that filter_fn accepts", got)
    for layer, name in chosen.items():
        _check_linear(op, f"layer {name!r}", layer)
        check_initial(op, "rho_init", rho_init, layer.weight.dtype)
    # Attention reads the weight of its projection.
    left = {n: m for n, m in others.items() if type(m) is not NonDynamicallyQuantizableLinear}
    left = {n: m for n, m in left.items() if filter_fn is None or filter_fn(n, m)}
    if left:
        warn(f"{op}: not turned, subclasses of torch.nn.Linear: {_described(left)}")
    memo: dict = {}
    model = copy_model(op, model, memo=memo)
    for layer in chosen:
        _turn(memo[id(layer)], rho_init, prior)
    for module in model.modules():
        _leave_fused_paths(module)
    return model


def _described(layers: dict[str, nn.Linear]) -> str:
    return describe({name: qualified_name(type(layer)) for name, layer in layers.items()})


def _check_linear(op: str, place: str, layer: nn.Linear) -> None:
    """Raises for a linear layer that cannot be turned."""
    if isinstance(layer, nn.LazyLinear):
        refuse(op, place, "have a shape (run one forward first)", "a LazyLinear")
    if layer.weight.dtype not in DTYPES:
        refuse(op, place, "have its weight in float32 or float64", layer.weight.dtype, TypeError)
    if is_traceable_wrapper_subclass(layer.weight):
        requirement = "have its weight as an ordinary tensor (not quantised or sharded)"
        refuse(op, place, requirement, qualified_name(type(layer.weight)), TypeError)
    if 0 in (layer.in_features, layer.out_features):
        got = f"{layer.in_features} and {layer.out_features}"
        refuse(op, place, "have at least one input and one output", got)
    if "weight" not in layer._parameters:
        requirement = "have its weight as a parameter (remove weight norm or pruning first)"
        refuse(op, place, requirement, f"one made of {list(layer._parameters)}")
    if "forward" in vars(layer):
        requirement = "have the forward of its class (take the other one off first)"
        refuse(op, place, requirement, "one that is set on the object")


def _turn(linear: nn.Linear, rho_init, prior) -> None:
    """Makes a linear layer a Bayesian one around its weights, in place: its hooks stay, what else
    it holds, and whoever shares it."""
    made = BayesLinear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        prior=prior,
        mu_init=0.0,  # draws nothing
        rho_init=rho_init,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
    )
    made.mu_init = None
    made.weight_mu, made.bias_mu = linear.weight, linear.bias
    others = {k: p for k, p in linear._parameters.items() if k not in ("weight", "bias")}
    linear._parameters = {**made._parameters, **others}
    linear._buffers.update(made._buffers)
    linear._modules.update(made._modules)  # a prior with parameters
    vars(linear).update({k: v for k, v in vars(made).items() if k not in OF_EVERY_MODULE})
    linear.__class__ = BayesLinear


def _leave_fused_paths(module: nn.Module) -> None:
    """Torch's encoders read the weights of their linear layers in eval()
    instead of calling them."""
    if isinstance(module, nn.TransformerEncoderLayer):
        if isinstance(module.linear1, BayesLinear) or isinstance(module.linear2, BayesLinear):
            module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        if any(isinstance(m, BayesLinear) for m in module.modules()):
            module.use_nested_tensor = False


class PosteriorSummary(NamedTuple):
    """All weights of a model's Bayesian layers, without biases, layer after layer.

    Attributes:
        snr: (W,) |mu| / sigma, the signal-to-noise ratio; 0 where mu is,
            finite where sigma is next to nothing.
        magnitude: (W,) |mu|.
        std: (W,) sigma.
        layers: the slice of each layer by its name.
    """

    snr: Tensor
    magnitude: Tensor
    std: Tensor
    layers: dict[str, slice]


def posterior_summary(model: nn.Module) -> PosteriorSummary:
    """Signal-to-noise ratio, magnitude and spread of every weight, pruned or not, on the CPU.

    Args:
        model: holds `BayesLinear` layers.

    Returns:
        PosteriorSummary: the weights of all layers, without biases.

    Raises:
        TypeError: model is no module. ValueError: it has no Bayesian layer.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), section 5.1.
    """
    layers, mu, rho = _weights_of("posterior_summary", model)
    places, start = {}, 0
    for name, layer in layers.items():
        places[name] = slice(start, start + layer.weight_mu.numel())
        start = places[name].stop
    snr = _log_signal_to_noise(mu, rho).exp().clamp(max=torch.finfo(mu.dtype).max).to(mu.dtype)
    return PosteriorSummary(snr, mu.abs(), sigma_of(rho), places)


def _weights_of(op: str, model: nn.Module) -> tuple[dict[str, BayesLinear], Tensor, Tensor]:
    """The Bayesian layers, and means and spreads of all their weights, on the CPU."""
    layers = require_bayes_layers(op, model)
    check_whole(op, layers)
    with torch.no_grad():
        mu = torch.cat([layer.weight_mu.flatten().cpu() for layer in layers.values()])
        rho = torch.cat([layer.weight_rho.flatten().cpu() for layer in layers.values()])
    return layers, mu, rho


def _log_signal_to_noise(mu: Tensor, rho: Tensor) -> Tensor:
    """log(|mu| / sigma), which tells weights apart where sigma is 0; -inf where mu is 0."""
    mu, rho = mu.double(), rho.double()
    return torch.where(mu == 0, -math.inf, mu.abs().log() - log_sigma_of(rho))


def prune(model: nn.Module, fraction: float, by: str = "snr") -> float:
    """Sets the lowest-ranked weights to exactly 0 in every sample, in place; biases stay.

    The weights of all Bayesian layers are ranked together. Their means and spreads are kept, so
    that another call, with fraction 0 for instance, starts from all weights again. A pruned layer
    has one buffer more, `weight_mask`, which `torch.optim.swa_utils.AveragedModel` cannot average:
    make the average after pruning, without `use_buffers`.

    Args:
        model: holds `BayesLinear` layers.
        fraction: of the weights, in [0, 1].
        by: "snr" ranks by |mu| / sigma, "magnitude" by |mu|.

    Returns:
        The fraction that is pruned: that asked for, to the nearest weight.

    Raises:
        ValueError, TypeError: no Bayesian layer, or an argument out of range;
            the model is as before.

    Source: Blundell et al. (2015), section 5.1; Graves, Practical Variational Inference (2011).
    """
    check_fraction("prune", "fraction", fraction)
    check_one_of("prune", "by", by, RANKINGS)
    layers, mu, rho = _weights_of("prune", model)
    scores = mu.abs() if by == "magnitude" else _log_signal_to_noise(mu, rho)
    count = round(fraction * len(scores))
    if count and scores.isnan().any():
        got = f"{int(scores.isnan().sum())} that are nan"
        refuse("prune", "model", "have weights that can be ranked", got)
    keep = torch.ones(len(scores), dtype=torch.bool, device="cpu")
    # By rank, not by threshold: equal scores are pruned up to the fraction too.
    keep[scores.argsort(stable=True)[:count]] = False
    parts = keep.split([layer.weight_mu.numel() for layer in layers.values()])
    with without_gradients():
        for layer, part in zip(layers.values(), parts, strict=True):
            # Its own memory: file formats that keep a tensor once would leave the others out.
            mask = part.view_as(layer.weight_mu).to(layer.weight_mu.device, copy=True)
            layer.weight_mask = mask if count else None
    return count / len(scores)
