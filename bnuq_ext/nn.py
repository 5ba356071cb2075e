"""Stochastic batch norm layers: the torch classes, and what they do inside a pass."""

import torch
from torch import Tensor, nn

from .replicas import current_pass


class Stochastic:
    """Mixin of a batch-norm layer whose statistics can be sampled.

    Outside a pass it is the class that it is mixed into, in train() and in eval(). `bank` and `bank_name`
    are plain attributes: they are no part of the state_dict, and deepcopy and pickle keep them.
    """

    bank = None  # Bank, shared by all layers of a model
    bank_name = None  # the layer's key in the bank

    def forward(self, x: Tensor) -> Tensor:
        active = current_pass()
        return self.plain_forward(x) if active is None else active.visit(self, x)

    def plain_forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class StochasticBatchNorm1d(Stochastic, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose statistics are sampled inside `predict`."""


class StochasticBatchNorm2d(Stochastic, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose statistics are sampled inside `predict`."""


class StochasticBatchNorm3d(Stochastic, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose statistics are sampled inside `predict`."""


class StochasticSyncBatchNorm(Stochastic, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` whose statistics are sampled inside `predict`."""


def named_stochastic_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The stochastic layers of a model by qualified name, each once, in the order of the modules."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Stochastic)}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the type of statistics and parameters in every op."""
    return torch.float64 if dtype == torch.float64 else torch.float32
