"""Recognises what does batch norm in a model, and says why some of it cannot be converted."""

from __future__ import annotations

import re
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .adapters import find_adapter, is_frozen, qualified_name
from .nn import STOCHASTIC_CLASSES, Stochastic

EXCLUDED = "_bnuq_excluded"  # attribute of a layer that filter_fn has left out
_INTERPRETED = "torch.export.unflatten.InterpreterModule"  # whose import takes long
_SHOWN = 4  # names


class Survey(NamedTuple):
    """What a model has, each module once, by the first of its names.

    Attributes:
        stochastic: layers that are converted already.
        convertible: layers that convert can make stochastic.
        excluded: such layers too, which a filter_fn has left out before.
        unsupported: class and reason of the others that do batch norm and must stay as they are.
    """

    stochastic: dict[str, nn.Module]
    convertible: dict[str, nn.Module]
    excluded: dict[str, nn.Module]
    unsupported: dict[str, str]


def describe(unsupported: dict[str, str]) -> str:
    """Names by reason, not all where there are many."""
    names: dict[str, list[str]] = {}
    for name, reason in unsupported.items():
        names.setdefault(reason, []).append(name)
    return ", ".join(f"{listed(group)} ({reason})" for reason, group in names.items())


def listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def survey(model: nn.Module) -> Survey:
    """Look at every module; at none below an unsupported one, whose parts are its own affair."""
    result, seen, stack = Survey({}, {}, {}, {}), set(), [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        reason = _reason(module)
        if reason is not None:
            result.unsupported[name] = f"{type(module).__name__}: {reason}"
        elif isinstance(module, Stochastic):
            result.stochastic[name] = module
        elif _is_known(module):
            group = result.excluded if hasattr(module, EXCLUDED) else result.convertible
            group[name] = module
        if reason is None or isinstance(module, torch.fx.GraphModule):
            children = [(key, m) for key, m in module._modules.items() if m is not None]
            stack += [(f"{name}.{key}" if name else key, m) for key, m in reversed(children)]
    return result


def averages_rows(module: nn.Module) -> bool:
    """Whether a module takes statistics over the rows in train(): torch's batch norm,
    or what keeps them."""
    if is_frozen(module):
        return False
    if isinstance(module, _BatchNorm):
        return True
    buffers = module._buffers  # of a ScriptModule: no dict
    return "running_mean" in buffers and buffers["running_mean"] is not None


def _is_known(module: nn.Module) -> bool:
    return type(module) in STOCHASTIC_CLASSES or find_adapter(module) is not None


def _reason(module: nn.Module) -> str | None:
    """Why a module does batch norm in a way that cannot be sampled; None where it does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return _reason_scripted(module)
    if _is_known(module):
        # forward set on the instance would hide the stochastic one.
        return "its forward is replaced on the object" if "forward" in vars(module) else None
    if isinstance(module, Stochastic | _InstanceNorm):
        return None
    names = [qualified_name(cls) for cls in type(module).__mro__]
    if "torch._dynamo.eval_frame.OptimizedModule" in names:
        inner = survey(module._orig_mod)
        left = inner.convertible or inner.unsupported
        return "compiled; convert first, then torch.compile" if left else None
    if any(name.startswith("torch.ao.nn.") for name in names):
        return _reason_of_torch_ao(module, names)
    if isinstance(module, torch.fx.GraphModule) or _INTERPRETED in names:
        calls = sum(
            n.op == "call_function" and "batch_norm" in str(n.target) for n in module.graph.nodes
        )
        return f"its graph has {calls} batch_norm calls; convert before export" if calls else None
    return _reason_of_class(module)


def _reason_scripted(module: torch.jit.ScriptModule) -> str | None:
    parts = {part.original_name for part in module.modules() if hasattr(part, "original_name")}
    in_graph = hasattr(module, "forward") and "aten::batch_norm" in str(module.inlined_graph)
    if in_graph or any(_says_batch_norm(part) for part in parts):
        return "TorchScript; convert the Python model"
    return None


def _reason_of_torch_ao(module: nn.Module, names: list[str]) -> str | None:
    if any(re.search("Bn|BN|BatchNorm", name) for name in names):
        return "quantised or fused by torch.ao; convert the float model"
    # In eval() the weights of a fused module have its batch norm in them, and a bias then; in QAT
    # the batch norm is in the name.
    fused = names[0].startswith("torch.ao.nn.intrinsic.") and ".qat." not in names[0]
    if fused and _has_bias(module):
        return "fused by torch.ao, perhaps with batch norm; convert the model before it is fused"
    return None


def _has_bias(module: nn.Module) -> bool:
    found = [getattr(part, "bias", None) for part in module.modules()]
    return any((b() if callable(b) else b) is not None for b in found)  # of quantised ones a method


def _reason_of_class(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        if isinstance(module, LazyModuleMixin):
            return "lazy; run one dummy forward first"
        if is_parametrized(module):
            return "parametrised; remove the parametrisations first"
        return "a subclass of a torch batch norm; see bnuq_ext.register_adapter"
    if type(module) is nn.Module:  # holds what a graph computes with, and has no forward
        return None
    has_statistics = {"running_mean", "running_var"} <= module._buffers.keys()
    if has_statistics or (_says_batch_norm(type(module).__name__) and _computes_itself(module)):
        return "an unknown class of batch norm; see bnuq_ext.register_adapter"
    return None


def _computes_itself(module: nn.Module) -> bool:
    """Whether a module has no parts, or none with tensors while it has some itself."""
    parts = [m for m in module._modules.values() if m is not None]
    layers = [m for m in parts if not isinstance(m, (nn.ParameterList, nn.ParameterDict))]
    return not parts or (_has_tensors(module) and not any(map(_has_tensors, layers)))


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))


def _says_batch_norm(name: str) -> bool:
    return "batchnorm" in name.lower().replace("_", "")
