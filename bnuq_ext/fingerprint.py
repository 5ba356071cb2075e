"""What a model's forward depends on, as a value to compare."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

from torch import nn
from torch.nn.modules import module as every_module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .contents import SCALARS, Contents, identity, layout_of, memory_of, version_of
from .optimizer_steps import STEPS, steps_of, watch_optimizers
from .state import OF_EVERY_MODULE
from .structure import OURS

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = {kind: getattr(every_module, f"_global{kind}") for kind in HOOKS}
_REPARAMETRISE = (BasePruningMethod, SpectralNorm, WeightNorm)


class Fingerprint(NamedTuple):
    """What a model is, and apart from it the versions of its parameters and buffers,
    which training changes."""

    structure: list
    versions: list


def fingerprint(modules: list[nn.Module]) -> Fingerprint:
    """Identity, type, plain attributes, hooks, and identity and version
    of every parameter and buffer; the hooks of all modules.

    Two equal fingerprints of one model mean that its forward is still the same function, as far as
    it can be seen from outside: in-place changes of tensors count, other memory under them, steps
    of optimizers, and what `Contents` looks into. Changes inside other objects, of global
    variables, of what hooks hold, and writes by way of `.data`, NumPy or a replayed CUDA graph do
    not. The training flags are left out.
    """
    watch_optimizers()
    seen, versions = [], []
    add, contents = seen.append, Contents(seen, modules)
    for hooks in _GLOBAL_HOOKS.values():
        if hooks:
            seen += _hook_keys(hooks)
    for module in modules:
        attributes = module.__dict__
        add(id(module))
        add(type(module))
        for kind in HOOKS:
            if attributes[kind]:
                seen += _hook_keys(attributes[kind])
        _append_tensors(seen, versions, module)
        before = attributes["_forward_pre_hooks"]
        made = _made_by_hooks(before) if before else ()
        for name, value in attributes.copy().items():  # another thread may add some
            if name not in OF_EVERY_MODULE and name not in made:
                add(name)
                if type(value) in SCALARS:  # nearly all are
                    seen += (type(value), value)  # 1 == 1.0 == True
                elif name in getattr(type(module), "not_by_forwards", ()):
                    seen += identity(value)
                else:
                    contents.append(value)
    return Fingerprint(seen, versions)


def has_hooks(modules: list[nn.Module], kinds: tuple[str, ...] = HOOKS) -> bool:
    """Whether a hook of some kinds, other than ours, is set on one of some modules or on all."""
    if any([_GLOBAL_HOOKS[kind] for kind in kinds]):
        return True
    dicts = [hooks for m in modules for kind in kinds if (hooks := m.__dict__[kind])]
    hooks = [hook for found in dicts for hook in [*found.values()]]
    return not all([hasattr(hook, OURS) for hook in hooks])


def _hook_keys(hooks: dict) -> list[tuple[int, int]]:
    """What tells hooks apart but for ours. What they hold is as a rule what they take down."""
    # The key is new for every hook; an id may come again. Another thread may add one of ours.
    return [(key, id(hook)) for key, hook in [*hooks.items()] if not hasattr(hook, OURS)]


def _append_tensors(seen: list, versions: list, module: nn.Module) -> None:
    for tensor in (*module._parameters.values(), *module._buffers.values()):  # traced: no dicts
        seen.append(id(tensor))
        if tensor is not None:
            seen.append(layout_of(tensor))
            # `tensor.data = other` changes the memory alone; the next may lie at the same address.
            versions += version_of(tensor), ref(memory_of(tensor))
    if STEPS:
        versions += [n for p in module._parameters.values() if (n := steps_of(p))]


def _made_by_hooks(hooks: dict) -> list[str]:
    """Names of the attributes that torch's hooks make of parameters
    and buffers anew before each forward."""
    given = [*hooks.values()]  # at once: another thread may set one of ours
    found = [hook for hook in given if isinstance(hook, _REPARAMETRISE)]
    return [getattr(hook, "_tensor_name", None) or hook.name for hook in found]
