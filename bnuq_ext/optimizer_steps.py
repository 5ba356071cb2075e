"""Steps of optimizers that the version counters of parameters do not show."""

from __future__ import annotations

from functools import cache, partial
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .contents import memory_of
from .untraced import untraced

STEPS: dict[int, tuple[ref, int]] = {}  # of the parameters with these ids: memory and number


@cache
def watch_optimizers() -> None:
    """Counts their steps from now on."""
    register_optimizer_step_post_hook(_note)


def steps_of(parameter: Tensor) -> int:
    """How many steps of optimizers have written into it unseen."""
    found = STEPS.get(id(parameter))
    return 0 if found is None else found[1]


def _note(optimizer: Optimizer, args, kwargs) -> None:
    if _writes_unseen(optimizer):
        _count(optimizer)


def _writes_unseen(optimizer: Optimizer) -> bool:
    """Fused kernels of torch write so, and those of other packages may, unless they are compiled."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return True
    others = type(optimizer).__module__.partition(".")[0] != "torch"
    return others and not torch.compiler.is_compiling()


@untraced
def _count(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            key = id(parameter)
            held, steps = STEPS.get(key, (None, 0))
            memory = memory_of(parameter)
            if held is None or held() is not memory:
                held = ref(memory, partial(_forget, key))
            STEPS[key] = held, steps + 1


def _forget(key: int, held: ref) -> None:
    if STEPS.get(key, (None,))[0] is held:
        del STEPS[key]
