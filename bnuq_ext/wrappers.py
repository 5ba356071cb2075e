"""What stands around a model: wrappers of torch.compile, and for several devices or processes."""

import sys
from collections.abc import Iterable

from torch import nn

from .ops.checks import refuse

_DATA_PARALLEL = nn.DataParallel, nn.parallel.DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model out of the wrappers of torch.compile and of data-parallel training, whose forwards
    wait for other processes, which may predict nothing, or other batches."""
    while True:
        if isinstance(model, _DATA_PARALLEL):
            model = model.module
        elif "_orig_mod" in model._modules:  # not hasattr: a wrapper may hand on what it wraps has
            model = model._orig_mod
        else:
            return model


def check_unwrapped(op: str, model: nn.Module) -> None:
    """Raises where a part of a model is wrapped for data-parallel training."""
    for name, module in model.named_modules():
        if isinstance(module, _DATA_PARALLEL):
            advice = f"put its .module into the place of {name!r}" if name else "give its .module"
            got = f"{type(module).__name__}; {advice}"
            refuse(op, "model", "not be wrapped for several devices", got)


def waits_for_others(modules: Iterable[nn.Module]) -> bool:
    """Whether forwards of a model with these modules wait for other processes, which have to make
    as many."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it shards; its import takes long
    names = "FullyShardedDataParallel", "FSDPModule"  # not yet where another thread imports it
    sharded = [kind for name in names if (kind := getattr(fsdp, name, None)) is not None]
    kinds = nn.parallel.DistributedDataParallel, *sharded
    return any([isinstance(module, kinds) for module in modules])
