"""Layers with a distribution over their weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .contents import is_freed
from .nn import check_model
from .ops import new_seed, philox_normal
from .ops.checks import (
    acc_dtype,
    check_flags,
    check_floating,
    check_integer,
    check_named_device,
    check_number,
    check_one_of,
    is_dense,
    refuse,
)
from .ops.formulas import sigma_of
from .ops.linear import bayes_linear_rows, shaped
from .ops.modes import autocasted, has_values, past_autocast
from .passes import Replicated
from .priors import GaussianPrior, Prior, check_prior
from .restore import unmoved_by_errors, without_gradients
from .samplers import Draw
from .state import names_of

ESTIMATORS = ("exact", "local")
DTYPES = (torch.float32, torch.float64)  # of weights that are sampled


class BayesLinear(Replicated, nn.Module):
    """A linear layer with an independent Gaussian over every weight and bias.

        y[t] = x[t] @ (weight_mu + sigma * eps[t])^T + bias[t],   sigma = softplus(weight_rho)

    In train() a plain call draws one sample of the weights (from torch's generator), in eval() it
    uses their means. Inside `predict`, `elbo_loss` and `replicas` it returns the rows
    of all replicas.

    With `estimator="exact"` one weight matrix serves all rows of a replica, and all calls of the
    layer in a forward. With "local" (local reparameterisation) every row draws its own outputs,
    from the distribution that they have:

        y[t, n] ~ N(x[n] @ weight_mu^T + bias_mu, x[n]^2 @ sigma^2^T + bias_sigma^2)

    Each row by itself is distributed as before and the gradient of a sum over rows has lower
    variance, but the rows of a replica no longer share a network: what depends on several rows of
    one replica, a function drawn from the posterior for example, is lost; and in `predict` the n-th
    rows of all batches of a loader have the same noise. Measured on a new network 64-100-10, one
    sample, scikit-learn's digits, variance by the sampling alone and time, "exact" over "local":

        rho                        -5               -3               -1
        rows                1   16  128      1   16  128      1   16  128
        by means          1.3  1.6  2.8    1.8  2.8  6.5    2.1  7.8   45
        by spreads         14   19   33     19   28   52     21   73  406
        time               0.5 to 0.6       0.4 to 0.6       0.3 to 0.7

    So: for training. Variance times time is at least 7 times less by the spreads; by the means it is
    less for wide posteriors or many rows, and not for few rows and rho -5. Predict with "exact".
    "local" squares x and sigma in the dtype of the weights: in float32 both have to stay below 1e19.

    The noise of replicas is that of `ops.philox_normal` with the seed
    `ops.new_seed(seed, first_replica)`, the stream 65,536 n for the n-th such layer of the model,
    from 0, in the order of `named_modules()`, and the tags "weight" and "bias".

    Shapes: (N, *, in_features) -> (N, *, out_features); outside `predict`, `elbo_loss` and
    `replicas` a single row (in_features,) too. x has the dtype of the weights, or 16 bits beside
    float32. Under autocast it is rounded and the result of its dtype, as with `torch.nn.Linear`.

    Args:
        in_features, out_features: sizes; positive.
        bias: whether there is one.
        prior: over weights and biases; `GaussianPrior`, `ScaleMixturePrior`, or an object with
            their `divergence(mu, rho, seed, stream, num_samples)`, in nats, which is called with
            those of the weights (O, I) and of the bias (O,); rho = -inf is a pruned weight that
            counts nothing.
        mu_init: the value, (low, high) of a uniform distribution,
            or None for that of `torch.nn.Linear`.
        rho_init: the value, or (low, high) of a uniform distribution.
        estimator: "exact" or "local".
        device, dtype: of the parameters; float32 or float64.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015); Kingma et al.,
    Variational Dropout and the Local Reparameterization Trick (2015).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        prior: Prior = GaussianPrior(1.0),  # noqa: B008 - immutable
        mu_init: float | tuple[float, float] | None = None,
        rho_init: float | tuple[float, float] = -5.0,
        estimator: str = "exact",
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "BayesLinear"
        in_features = check_integer(op, "in_features", in_features, 1)
        out_features = check_integer(op, "out_features", out_features, 1)
        check_flags(op, bias=bias)
        check_prior(op, prior)
        check_one_of(op, "estimator", estimator, ESTIMATORS)
        if device is not None:
            check_named_device(op, device)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            refuse(op, "dtype", "be float32 or float64", dtype, TypeError)
        if mu_init is not None:
            check_initial(op, "mu_init", mu_init, dtype)
        check_initial(op, "rho_init", rho_init, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.prior, self.estimator = prior, estimator
        self.mu_init, self.rho_init = mu_init, rho_init
        kwargs = {"device": device, "dtype": dtype}
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features, **kwargs))
        self.weight_rho = nn.Parameter(torch.empty(out_features, in_features, **kwargs))
        self.bias_mu = nn.Parameter(torch.empty(out_features, **kwargs)) if bias else None
        self.bias_rho = nn.Parameter(torch.empty(out_features, **kwargs)) if bias else None
        self.register_buffer("weight_mask", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws means and spreads anew by `mu_init` and `rho_init`."""
        bound = 1 / math.sqrt(self.in_features)  # nn.Linear's, for weight and bias
        mu_init = (-bound, bound) if self.mu_init is None else self.mu_init
        _fill((self.weight_mu, self.bias_mu), mu_init)
        _fill((self.weight_rho, self.bias_rho), self.rho_init)

    def __getattr__(self, name: str):
        for kind in ("_parameters", "_buffers"):  # at once: a call of the layer asks twenty times
            held = self.__dict__.get(kind, ())
            if name in held:
                return held[name]
        if name == "weight" and name not in self._modules:
            raise AttributeError(
                "a BayesLinear has no `weight` (its mean is weight_mu): what reads it of a layer, "
                "instead of calling that, needs the layer as it was; filter_fn of to_bayesian leaves it"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        pruned = ""
        mask = self.weight_mask
        if mask is not None and has_values(mask) and not mask.is_meta:
            pruned = f", pruned={mask.logical_not().double().mean():.1%}"
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias_mu is not None}, "
            f"prior={self.prior}, estimator={self.estimator!r}{pruned}"
        )

    def posterior(self) -> tuple[Tensor, Tensor]:
        """(weight_mu, weight_rho), with 0 and -inf for weights that are pruned."""
        if self.weight_mask is None:
            return self.weight_mu, self.weight_rho
        mu = torch.where(self.weight_mask, self.weight_mu, 0.0)
        return mu, torch.where(self.weight_mask, self.weight_rho, -math.inf)

    def _parameters_of(self, trial: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Means and spreads of weights and biases; in a trial the weights' own size is the least
        spread, and none is pruned: where all of a layer are, its output tells no rows apart."""
        if not trial:
            return *self.posterior(), self.bias_mu, self.bias_rho
        size = self.weight_mu.square().mean().sqrt()
        size = torch.where(size > 0, size, 1.0)
        least = size + (-(-size).expm1()).log()  # whose softplus is the size
        bias_rho = None if self.bias_rho is None else self.bias_rho.clamp(min=least)
        return self.weight_mu, self.weight_rho.clamp(min=least), self.bias_mu, bias_rho

    @property
    def one_draw(self) -> bool:
        """See `Replicated`: a replica has one weight matrix, but fresh noise in each row."""
        return self.estimator == "exact"

    def plain_forward(self, x: Tensor) -> Tensor:
        """One sample of the weights in train(), their means in eval()."""
        self._check_kind(x)
        self._check_features(x, 1)
        if not self.training:
            bias = None if self.bias_mu is None else self.bias_mu.to(x.dtype)
            return functional.linear(x, self.posterior()[0].to(x.dtype), bias)
        self._check_sampled()
        rows = x if x.dim() > 1 else x[None]
        with unmoved_by_errors():
            draw = Draw(1, new_seed(device=x.device), None, {})
            y = self.sample(rows.flatten(0, -2), draw, 0, shared=True)
        return shaped(y, (*x.shape[:-1], self.out_features))

    def replicate(self, x: Tensor, draw: Draw, key: str, stream: int, shared: bool) -> Tensor:
        """The rows of the draw's replicas, folded; see `Replicated`."""
        self._check_kind(x)
        self._check_features(x, 2)
        self._check_sampled()
        return self.sample(x, draw, stream, shared)

    def sample(self, x: Tensor, draw: Draw, stream: int, shared: bool) -> Tensor:
        """The rows of T replicas, folded: (T*N, *, out_features).

        Args:
            x: (N, *, in_features) if `shared`, else (T*N, *, in_features), replica-major.
            draw: in a trial the posterior is widened, so that samples differ by more than rounding.
            stream: see `ops.bayes_linear`.
        """
        T, x = draw.num_samples, autocasted(x)
        N, *inner = x.shape[:-1]
        folded = T * N if shared else N
        # Sizes are written out: -1 is ambiguous where one of the others is 0.
        if shared or T == 1:
            rows = x.reshape(N * math.prod(inner), self.in_features) if inner else x
        else:
            rows = x.reshape(T, N // T * math.prod(inner), self.in_features)
        op = _local if self.estimator == "local" else bayes_linear_rows
        weights = self._parameters_of(draw.trial)
        y = op(rows, *weights, seed=draw.seed, stream=stream, num_samples=T)
        return shaped(y, (folded, *inner, self.out_features))

    def _check_kind(self, x: Tensor) -> None:
        mu = self.weight_mu
        if isinstance(x, Tensor) and x.dtype is mu.dtype and x.device == mu.device:
            if is_dense(x) and x.is_floating_point():
                return  # soon, for it is asked in each call
        check_floating("BayesLinear", "x", x)  # of integers the weights would be rounded
        if x.device != mu.device:
            refuse("BayesLinear", "x", f"be on {mu.device} like the weights", x.device)
        # With weights that were made 16-bit the means still serve in eval().
        if mu.dtype not in (acc_dtype(x.dtype), x.dtype):
            refuse("BayesLinear", "x", f"be {mu.dtype} like the weights", x.dtype, TypeError)

    def _check_features(self, x: Tensor, least_dims: int) -> None:
        if x.dim() < least_dims or x.shape[-1] != self.in_features:
            refuse("BayesLinear", "x", f"have shape (N, *, {self.in_features})", list(x.shape))

    def _check_sampled(self) -> None:
        dtype = self.weight_mu.dtype
        if dtype not in DTYPES:
            requirement = "be float32 or float64 where they are sampled (beside a 16-bit x, too)"
            refuse("BayesLinear", "the weights", requirement, dtype, TypeError)

    def kl_divergence(self, seed: Tensor, stream: int, num_samples: int) -> Tensor:
        """Divergence of weights and biases from the prior, in nats; () in the parameters' dtype.

        A weight that is pruned counts nothing.
        """
        kl = self._divergence(*self.posterior(), seed, stream, num_samples)
        if self.bias_mu is not None:
            kl = kl + self._divergence(self.bias_mu, self.bias_rho, seed, stream, num_samples)
        return kl

    def _divergence(self, *args) -> Tensor:
        found = self.prior.divergence(*args)
        if not isinstance(found, Tensor) or found.dim() > 0:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            refuse("BayesLinear", "prior.divergence", "return a tensor of shape []", got, TypeError)
        return found

    @property
    def has_closed_divergence(self) -> bool:
        """Whether `kl_divergence` is that from a Gaussian prior, and no subclass's own;
        it needs no noise then."""
        own = type(self).kl_divergence is BayesLinear.kl_divergence
        return own and type(self.prior) is GaussianPrior

    def gaussian_divergence(self) -> list[tuple[Tensor, Tensor, float]]:
        """(mu, rho, std of the prior) of weights and biases for `gaussian_kl_sum`,
        where the form is closed."""
        weight = (*self.posterior(), self.prior.std)
        bias = (self.bias_mu, self.bias_rho, self.prior.std)
        return [weight] if self.bias_mu is None else [weight, bias]

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # A mask exists only in a pruned layer; a checkpoint of the layer says whether it is one.
        mask, shape = state_dict.get(prefix + "weight_mask"), self.weight_mu.shape
        if getattr(state_dict.get(prefix + "weight_mu"), "shape", None) == shape:
            if mask is None:
                self.weight_mask = None
            elif mask.shape == shape:
                with without_gradients():
                    self.weight_mask = mask.to(self.weight_mu.device, torch.bool, copy=True)
            elif self.weight_mask is None:  # else torch says so
                *_, errors = args
                found = f"{list(mask.shape)} in the checkpoint and {list(shape)} in the layer"
                errors.append(f"size mismatch for {prefix}weight_mask: {found}.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.weight_mask is not None:  # with assign=True the checkpoint's own, of any dtype
            self.weight_mask = self.weight_mask.to(torch.bool)


def _local(
    x: Tensor,
    mu: Tensor,
    rho: Tensor,
    bias_mu: Tensor | None,
    bias_rho: Tensor | None,
    *,
    seed: Tensor,
    stream: int,
    num_samples: int,
) -> Tensor:
    """`ops.bayes_linear` with fresh noise in each row."""
    xs = x.to(mu.dtype)
    with past_autocast(x.device):  # in float16 the squares of sigma are 0
        mean = functional.linear(xs, mu, bias_mu)
        var = functional.linear(xs.square(), sigma_of(rho).square())
    if bias_rho is not None:
        var = var + sigma_of(bias_rho).square()
    shape = (num_samples, x.shape[-2], mu.shape[0])
    z = philox_normal(seed, stream, shape, tag="local").to(mu.dtype)
    # The root's slope is infinite at 0, where every weight's spread is 0.
    std = torch.where(var > 0, var, 1.0).sqrt() * (var > 0)
    return (mean + std * z).to(x.dtype)


def check_initial(op: str, name: str, value, dtype: torch.dtype = torch.float64) -> None:
    """Checks what to initialise with: a finite number, or (low, high),
    that parameters of `dtype` can hold."""
    pair = isinstance(value, (tuple, list))
    ends = tuple(value) if pair else (value, value)
    if len(ends) != 2:
        refuse(op, name, "be a number or (low, high)", value)
    for end in ends:
        check_number(op, name, end)
    if not all(map(math.isfinite, ends)):
        refuse(op, name, "be finite", value)
    largest = torch.finfo(dtype).max / (2 if pair else 1)  # high - low has to be finite too
    if any(abs(float(end)) > largest for end in ends):
        refuse(op, name, f"be at most {largest:.5g} in size for {dtype}", value)
    if ends[0] > ends[1]:
        refuse(op, name, "have low at most high", value)


def _fill(parameters: tuple[Tensor | None, ...], initial: float | tuple[float, float]) -> None:
    with torch.no_grad():
        for parameter in filter(lambda p: p is not None, parameters):
            if isinstance(initial, (tuple, list)):
                parameter.uniform_(*map(float, initial))
            else:
                parameter.fill_(float(initial))


def bayes_layers(
    model: nn.Module, modules: list[nn.Module] | None = None
) -> dict[str, BayesLinear]:
    """The Bayesian layers of a model by qualified name, each once; `modules` are its, if known."""
    if modules is not None and not any([isinstance(m, BayesLinear) for m in modules]):
        return {}
    return {name: m for m, name in names_of(model).items() if isinstance(m, BayesLinear)}


def check_whole(op: str, layers: dict[str, BayesLinear]) -> None:
    """Raises where a layer holds but a part of its weights:
    of the rest this process has nothing to say."""
    for name, layer in layers.items():
        for w in (layer.weight_mu, layer.weight_rho):
            whole = w.shape == (layer.out_features, layer.in_features)
            whole = whole and not (has_values(w) and is_freed(w))
            if not whole or (type(w) is not nn.Parameter and hasattr(w, "placements")):
                requirement = (
                    "have its weights whole (gather what is sharded among processes first)"
                )
                refuse(op, f"layer {name!r}", requirement, f"{type(w).__name__} {list(w.shape)}")


def require_bayes_layers(op: str, model) -> dict[str, BayesLinear]:
    """The Bayesian layers of what must be a model with some; raises in the name of `op`."""
    check_model(op, model)
    layers = bayes_layers(model)
    if not layers:
        refuse(op, "model", "contain a BayesLinear", "none; run bnuq_ext.to_bayesian first")
    return layers
