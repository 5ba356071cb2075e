"""Recognises what does batch normalisation in a model, and says why some of it cannot be converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .nn import Stochastic

EXCLUDED = "_bnuq_excluded"  # attribute of a layer that filter_fn has left out


class Survey(NamedTuple):
    """What a model has, each module once, by the first of its names.

    Attributes:
        stochastic: layers that are converted already.
        convertible: layers that convert can make stochastic.
        unsupported: why the others that do batch norm must stay as they are.
    """

    stochastic: dict[str, nn.Module]
    convertible: dict[str, nn.Module]
    unsupported: dict[str, str]


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def survey(model: nn.Module, is_known: Callable[[nn.Module], bool]) -> Survey:
    """Look at every module of a model; nothing below an unsupported one, whose parts are its own affair.

    Args:
        model: any module.
        is_known: whether convert knows the class of a module.
    """
    result, seen, stack = Survey({}, {}, {}), set(), [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        reason = _reason(module, is_known)
        if reason is not None:
            result.unsupported[name] = reason
        elif isinstance(module, Stochastic):
            result.stochastic[name] = module
        elif is_known(module):
            result.convertible[name] = module
        if reason is None or isinstance(module, torch.fx.GraphModule):
            children = [(key, m) for key, m in module._modules.items() if m is not None]
            stack += [(f"{name}.{key}" if name else key, m) for key, m in reversed(children)]
    return result


def _reason(module: nn.Module, is_known: Callable[[nn.Module], bool]) -> str | None:
    """Why a module does batch norm in a way that cannot be sampled; None where it does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return _reason_scripted(module)
    if is_known(module):
        # forward set on the instance would hide the stochastic one.
        return "its forward is replaced on the object" if "forward" in vars(module) else None
    if isinstance(module, Stochastic | _InstanceNorm):
        return None
    names = [qualified_name(cls) for cls in type(module).__mro__]
    if "torch._dynamo.eval_frame.OptimizedModule" in names:
        inner = survey(module._orig_mod, is_known)
        return "compiled; convert first, then torch.compile" if any(inner) else None
    if any(
        name.startswith("torch.ao.nn.") and re.search("Bn|BN|BatchNorm", name) for name in names
    ):
        return "quantised or fused by torch.ao; convert the float model"
    if isinstance(module, torch.fx.GraphModule):
        calls = sum(
            n.op == "call_function" and "batch_norm" in str(n.target) for n in module.graph.nodes
        )
        return f"its graph calls batch_norm {calls} times; convert before export" if calls else None
    return _reason_of_class(module)


def _reason_scripted(module: torch.jit.ScriptModule) -> str | None:
    parts = {part.original_name for part in module.modules() if hasattr(part, "original_name")}
    in_graph = hasattr(module, "forward") and "aten::batch_norm" in str(module.inlined_graph)
    if in_graph or any(_says_batch_norm(part) for part in parts):
        return "TorchScript; convert the Python model"
    return None


def _reason_of_class(module: nn.Module) -> str | None:
    if isinstance(module, LazyModuleMixin) and isinstance(module, _BatchNorm):
        return "lazy; run one dummy forward first"
    if isinstance(module, _BatchNorm) and is_parametrized(module):
        return "parametrised; remove the parametrisations first"
    if isinstance(module, _BatchNorm):
        return "a subclass of a torch batch norm; see bnuq_ext.register_adapter"
    has_statistics = {"running_mean", "running_var"} <= module._buffers.keys()
    if has_statistics or (not module._modules and _says_batch_norm(type(module).__name__)):
        return "an unknown class of batch norm; see bnuq_ext.register_adapter"
    return None


def _says_batch_norm(name: str) -> bool:
    return "batchnorm" in name.lower().replace("_", "")
