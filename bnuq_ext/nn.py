"""Stochastic batch norm layers: the torch classes, and what they do inside a pass."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops.batch_norm import batch_norm_fitted, batch_norm_snapshots
from .ops.channel_moments import channel_moments
from .ops.checks import refuse
from .passes import Replicated, current_pass
from .samplers import Draw, Fitted


class Stochastic(Replicated):
    """Mixin of a batch-norm layer whose statistics can be sampled; stands before the torch class.

    Outside a pass it is the class that it is mixed into, in train() and in eval(). `bank` and
    `bank_name` are plain attributes: no part of the state_dict, kept by deepcopy and pickle.

    A pass uses `affine_parameters`, `batch_statistics` and `finish`; an adapter of another class
    overrides what differs there.
    """

    needs_bank = True
    bank = None  # Bank, shared by all layers of a model
    bank_name = None  # the layer's key in the bank
    not_by_forwards = ("bank", "bank_name")  # another thread may attach one while a trial runs
    frozen = False  # whether train() leaves the layer in eval; see `freeze`

    def __getattr__(self, name: str):
        found = super().__getattr__(name)
        if name in ("running_mean", "running_var") and found is not None:
            active = current_pass()
            if active is not None:
                return active.statistic(self, name, found)
        return found

    def train(self, mode: bool = True):
        super().train(mode)
        self.training = self.training and not self.frozen
        return self

    def reset_running_stats(self) -> None:
        """As in torch, unless they are frozen: `torch.optim.swa_utils.update_bn` would not fill
        them again."""
        if not self.frozen:
            super().reset_running_stats()

    def extra_repr(self) -> str:
        told = super().extra_repr()
        return ", ".join(filter(None, [told, "frozen=True"])) if self.frozen else told

    def replicate(self, x: Tensor, draw: Draw, key: str, stream: int, shared: bool) -> Tensor:
        """The rows of the draw's replicas, folded; see `Replicated`."""
        return self.finish(self.normalised(x, draw, key, stream, shared))

    def normalised(
        self, x: Tensor, draw: Draw, key: str, stream: int, shared: bool, **others
    ) -> Tensor:
        """`replicate` before `finish`; `others` are arguments of `ops.batch_norm_bank`."""
        statistics = draw.tables[key]
        weight, bias, eps = self.affine_parameters()
        options = {"weight": weight, "bias": bias, "eps": eps, "shared": shared, **others}
        if isinstance(statistics, Fitted):
            source = (statistics.params, draw.seed, stream, draw.num_samples, statistics.family)
            return batch_norm_fitted(x, *source, **options)
        return batch_norm_snapshots(x, *statistics, draw.snapshot, **options)

    def check_input(self, x: Tensor) -> None:
        """Raises as the original class does for an x with the wrong number of dimensions,
        if it checks that."""
        check = getattr(self, "_check_input_dim", None)
        if check is not None:
            check(x)

    def finish(self, y: Tensor) -> Tensor:
        """What the original class does to the normalised y (N, C, *); here nothing."""
        return y

    def affine_parameters(self) -> tuple[Tensor | None, Tensor | None, float]:
        """(weight (C,), bias (C,), eps); None stands for ones and zeros."""
        own = self._parameters
        if "weight" in own and "bias" in own:  # where a module looks for them last
            return own["weight"], own["bias"], self.eps
        return self.weight, self.bias, self.eps

    def batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Mean and biased variance of each channel over everything else.

        Args:
            x: (N, C, *) the layer's input.

        Returns:
            mean (C,), variance (C,), both float32 (float64 for float64), and the number of values
            that a channel has.
        """
        mean, var = channel_moments(x)
        return mean, var, x[:, 0].numel()

    def normalise_as_in_training(self, x: Tensor) -> Tensor:
        """x by its own statistics, and by the very function of train mode, so that deeper layers
        see what they see in training."""
        weight, bias, eps = self.affine_parameters()
        # A frozen layer's may be 0, which is refused.
        eps = max(eps, torch.finfo(torch.float32).tiny)
        # Stand-ins for the buffers of training: beside float32 weights or buffers alone the
        # statistics of numbers of 16 bits are kept in float32.
        own = [self._buffers.get(name) for name in ("running_mean", "running_var")]
        running = [b if b is None else torch.zeros_like(b) for b in own]
        return self.finish(F.batch_norm(x, *running, weight, bias, True, 0.0, eps))


class StochasticBatchNorm1d(Stochastic, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, made like it, whose statistics `predict` and `replicas` sample."""


class StochasticBatchNorm2d(Stochastic, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, made like it, whose statistics `predict` and `replicas` sample."""


class StochasticBatchNorm3d(Stochastic, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, made like it, whose statistics `predict` and `replicas` sample."""


class StochasticSyncBatchNorm(Stochastic, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`, made like it, whose statistics `predict` and `replicas` sample."""


STOCHASTIC_CLASSES = {
    nn.BatchNorm1d: StochasticBatchNorm1d,
    nn.BatchNorm2d: StochasticBatchNorm2d,
    nn.BatchNorm3d: StochasticBatchNorm3d,
    nn.SyncBatchNorm: StochasticSyncBatchNorm,
}


def check_model(op: str, model) -> None:
    if not isinstance(model, nn.Module):
        refuse(op, "model", "be a torch.nn.Module", type(model).__name__, TypeError)


def uncompiled_name(name: str) -> str:
    """The qualified name of a module without torch.compile's wrappers."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def named_stochastic_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The stochastic layers of a model by qualified name, each once, in the order of the modules.

    torch.compile's wrapper does not show in a name, so that a bank fits with it and without.
    """
    return {
        uncompiled_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, Stochastic)
    }


def require_stochastic_layers(op: str, model) -> dict[str, nn.Module]:
    """The stochastic layers of what must be a model with some; raises in the name of `op`."""
    check_model(op, model)
    layers = named_stochastic_layers(model)
    if not layers:
        got = "none; run bnuq_ext.convert first"
        refuse(op, "model", "contain stochastic batch-norm layers", got)
    return layers


def original_class(layer: nn.Module) -> type[nn.Module]:
    """The class that a stochastic layer was made from."""
    return next(
        cls
        for cls in type(layer).__mro__
        if issubclass(cls, nn.Module) and not issubclass(cls, Stochastic)
    )
