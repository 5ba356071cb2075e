"""Turns the batch-norm layers of a model into stochastic ones, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from .adapters import find_adapter
from .batch_norm_like import EXCLUDED, Survey, describe, survey
from .inputs import tensors
from .nn import STOCHASTIC_CLASSES, Stochastic, check_model, named_stochastic_layers, original_class
from .ops.checks import check_callable, check_flags, refuse
from .state import OWN_BANK, all_names_of, is_training
from .warn import warn

# Its class stays, but where the model itself is a layer that is turned.
Model = TypeVar("Model", bound=nn.Module)

_INPLACE = " (inplace=True needs no copy)"
_ORIGINAL = "_bnuq_original"  # attribute of a layer that took the place of another object


def convert(
    model: Model,
    *,
    inplace: bool = False,
    strict: bool = True,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
) -> Model:
    """The model with its batch-norm layers made stochastic; outside `predict` it behaves as before.

    BatchNorm1d/2d/3d and SyncBatchNorm (these types exactly) become StochasticBatchNorm1d/2d/3d
    and StochasticSyncBatchNorm: the same objects with another class, so that parameters, buffers,
    hooks, attributes, shared modules and state_dict keys stay. Other classes go through
    `register_adapter`. Layers that are stochastic already stay as they are.

    Args:
        model: any nn.Module that contains batch norm, or is one; a torch.fx GraphModule too.
            Convert before torch.compile and torch.export; `revert` before torch.jit.script,
            quantisation, fusion and tools of other packages that know batch norm by its class
            (BackPACK, Captum's LRP, Opacus' validator).
        inplace: change the given model instead of a copy; after an error it is unchanged.
        strict: raise if something like batch norm cannot be converted; otherwise warn, once, also
            where there is no other.
        filter_fn: gets (qualified name, module) of each layer that could be converted and says
            whether to, of a shared one with each of its names, any of which is enough; the others
            keep their class and are remembered as left out on purpose.

    Returns:
        The converted copy, or the given model (another object only where it is itself a batch norm
        whose adapter made a new one).

    Raises:
        TypeError: an argument of another type, or a model that copy.deepcopy refuses.
        ValueError: no batch norm, none that filter_fn chooses, or with `strict` some that cannot be
            converted.
    """
    check_model("convert", model)
    check_flags("convert", inplace=inplace, strict=strict)
    check_callable("convert", "filter_fn", filter_fn)
    found = survey(model)
    candidates = found.convertible | found.excluded
    chosen = list(candidates) if filter_fn is None else _choose(model, candidates, filter_fn)
    _check_found(model, found, chosen, strict)
    if not inplace:
        model = copy_model("convert", model, _INPLACE)
    layers = {name: model.get_submodule(name) for name in candidates}
    made = _make_stochastic({name: layers[name] for name in chosen})
    for name, layer in layers.items():
        _remember_excluded(layer, name not in chosen)
    return _replace(model, made)


def revert(model: Model, *, inplace: bool = False) -> Model:
    """The model with its stochastic layers turned back into what they were, without their bank.

    Parameters, buffers, hooks and flags are the current ones; but torch's batch norm cannot hold its
    statistics in train(), as layers that `freeze` has frozen do, which gives a warning.

    Args:
        model: a model with stochastic layers.
        inplace: change the given model instead of a copy.

    Returns:
        the copy, or the given model; where that is itself a stochastic layer, what stands for it.

    Raises:
        TypeError: model is no module, or one that copy.deepcopy refuses.
        ValueError: it has no stochastic layer, or one with a parametrisation.
    """
    check_model("revert", model)
    check_flags("revert", inplace=inplace)
    layers = named_stochastic_layers(model)
    if not layers:
        refuse("revert", "model", "contain a stochastic layer", "none")
    for name, layer in layers.items():
        if is_parametrized(layer):
            got = f"layer {name!r}" if name else "the model itself"
            refuse("revert", "model", "hold no stochastic layer that is parametrised", got)
    frozen = [repr(name) for name, layer in layers.items() if layer.frozen]
    if frozen:
        warn(
            f"revert: {', '.join(frozen)}: frozen, but torch's batch norm moves its statistics in train()"
        )
    if not inplace:
        model = copy_model("revert", model, _INPLACE)
    originals = {}
    for module in list(model.modules()):
        if isinstance(module, Stochastic):
            originals[id(module)] = _restore(module)
        _remember_excluded(module, False)
        vars(module).pop(OWN_BANK, None)
    return _replace(model, originals)


def copy_model(op: str, model: Model, instead: str = "", memo: dict | None = None) -> Model:
    """A deep copy. `instead`: what else the user can do. `memo`, if given, has the copy of every
    module afterwards."""
    memo = {} if memo is None else memo
    # torch cannot copy the buffers of lazy layers, which have no shape yet, nor tensors with a
    # graph: a weight that it has pruned, an output that a module kept.
    memo |= {
        id(b): type(b)(b.requires_grad, b.data.device, b.data.dtype)
        for b in model.buffers()
        if isinstance(b, nn.UninitializedBuffer)
    }
    try:
        memo |= {
            id(t): t.detach().clone()
            for module in model.modules()
            for t in tensors(vars(module))
            if not t.is_leaf
        }
        made = copy.deepcopy(model, memo)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, AssertionError) as error:  # the last of FSDP
        refuse(op, "model", f"be one that copy.deepcopy can copy{instead}", error, TypeError)
    for module in made.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # which lie apart in a copy: cuDNN would warn in each forward
    # Some classes copy themselves into train() (torchvision's feature extractors do).
    twins = dict(made.named_modules())
    for name, module in model.named_modules():
        if name in twins and is_training(twins[name]) != is_training(module):
            twins[name].train(module.training)
    return made


def _choose(model: nn.Module, layers: dict[str, nn.Module], filter_fn) -> list[str]:
    """Those of the layers, each with its first name, that filter_fn takes by one of their names."""
    names = all_names_of(model)
    return [first for first, m in layers.items() if any(filter_fn(n, m) for n in names[m])]


def _check_found(model: nn.Module, found: Survey, chosen: list[str], strict: bool) -> None:
    left = describe(found.unsupported)
    if left and strict:
        requirement = "contain only batch norm that can be converted (strict=False leaves the rest)"
        refuse("convert", "model", requirement, left)
    if not (chosen or found.stochastic):
        if found.convertible or found.excluded:
            refuse("convert", "filter_fn", "choose a layer", "none")
        if not left:
            refuse("convert", "model", "contain a batch-norm layer", f"none{_hint(model)}")
    if left:
        warn(f"convert: not converted: {left}")


def _hint(model: nn.Module) -> str:
    biased = sum(isinstance(m, _ConvNd) and m.bias is not None for m in model.modules())
    if not biased:
        return ""
    return (
        f"; {biased} of its convolutions have a bias: if batch norm has been fused into them, load "
        "the unfused checkpoint"
    )


def _make_stochastic(layers: dict[str, nn.Module]) -> dict[int, nn.Module]:
    """By id of each layer what takes its place; after an exception the classes are as before."""
    classes = [(layer, type(layer)) for layer in layers.values()]
    try:
        return {id(layer): _stochastic(name, layer) for name, layer in layers.items()}
    except BaseException:
        for layer, cls in classes:
            layer.__class__ = cls
        raise


def _stochastic(name: str, layer: nn.Module) -> nn.Module:
    adapt = find_adapter(layer)
    if adapt is None:
        layer.__class__ = STOCHASTIC_CLASSES[type(layer)]
        return layer
    made = adapt(layer)
    if not isinstance(made, Stochastic):
        got = type(made).__name__
        refuse("convert", f"the adapter of {name}", "return a stochastic layer", got, TypeError)
    if made is not layer:
        _check_new_object(name, layer, made)
        made.train(layer.training)
        vars(made)[_ORIGINAL] = layer  # not through __setattr__: it is no submodule
    return made


def _check_new_object(name: str, layer: nn.Module, made: nn.Module) -> None:
    if made.state_dict().keys() != layer.state_dict().keys():
        got = list(made.state_dict())
        refuse(
            "convert", f"the adapter of {name}", f"keep the keys {list(layer.state_dict())}", got
        )
    hooks = [key for key, hooks in vars(layer).items() if key.endswith("_hooks") and hooks]
    lost = [key for key in hooks if not vars(made).get(key)]
    if lost:
        refuse("convert", f"the adapter of {name}", f"carry over {', '.join(lost)}", "none")


def _restore(layer: nn.Module) -> nn.Module:
    """The original of a stochastic layer, with the layer's parameters, buffers and flags."""
    for attribute in ("bank", "bank_name", "frozen"):
        vars(layer).pop(attribute, None)
    original = vars(layer).pop(_ORIGINAL, None)
    if original is None:
        layer.__class__ = original_class(layer)
        return layer
    trainable = {name: p.requires_grad for name, p in layer.named_parameters()}
    original.load_state_dict(layer.state_dict(keep_vars=True), assign=True)
    for name, p in original.named_parameters():
        p.requires_grad_(trainable.get(name, p.requires_grad))
    called = {k: v for k, v in vars(layer).items() if "_hook" in k and "state_dict" not in k}
    vars(original).update(called)  # the tables themselves, which handles refer to
    return original.train(layer.training)


def _replace(model: nn.Module, replacements: dict[int, nn.Module]) -> nn.Module:
    """Puts each replacement into every slot of its original; returns the root."""
    for module in list(model.modules()):
        for key, child in module._modules.items():
            module._modules[key] = replacements.get(id(child), child)
    return replacements.get(id(model), model)


def _remember_excluded(layer: nn.Module, excluded: bool) -> None:
    vars(layer).pop(EXCLUDED, None)
    if excluded:
        setattr(layer, EXCLUDED, True)
