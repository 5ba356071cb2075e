"""Stochastic versions of batch-norm classes that are not torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from torch import Tensor, nn

from .nn import Stochastic
from .ops.checks import refuse

_ADAPTERS: dict[type | str, Callable[[nn.Module], nn.Module]] = {}


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register_adapter(
    cls_or_qualified_name: type | str, fn: Callable[[nn.Module], nn.Module]
) -> None:
    """Teach `convert` another batch-norm class; a later registration replaces an earlier one.

    The simplest adapter changes the class of the module that it gets, which keeps its parameters,
    hooks and attributes:

        class StochasticNorm(bnuq_ext.nn.Stochastic, Norm):
            def finish(self, y):        # what Norm does after the normalisation
                return self.act(y)

        def adapt(module):
            module.__class__ = StochasticNorm
            return module

    Its forward takes x alone: a layer that takes more (a condition) should hold a plain batch norm,
    which is converted by itself. Its `affine_parameters` may be overridden where `weight`, `bias`
    and `eps` have other names, its `check_input` to refuse an x as Norm does.

    Args:
        cls_or_qualified_name: the class, or "module.QualName" of one that need not be importable;
            it matches modules of exactly that type.
        fn: gets the module and returns a stochastic layer: the same object with another class, or a
            new object with the same state_dict keys.

    Raises:
        TypeError: for arguments of another type. ValueError: for a name without a module.
    """
    op, key = "register_adapter", cls_or_qualified_name
    is_module_class = isinstance(key, type) and issubclass(key, nn.Module)
    if not (is_module_class or isinstance(key, str)):
        refuse(
            op, "cls_or_qualified_name", "be a subclass of nn.Module or a string", key, TypeError
        )
    if isinstance(key, str) and not all(key.rpartition(".")):
        refuse(op, "cls_or_qualified_name", 'be a name like "package.module.Class"', repr(key))
    if not callable(fn):
        refuse(op, "fn", "be callable", type(fn).__name__, TypeError)
    _ADAPTERS[key] = fn


def find_adapter(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """The adapter of a module's exact type, by class or else by name."""
    cls = type(module)
    return _ADAPTERS.get(cls) or _ADAPTERS.get(qualified_name(cls))


class SwappedClass(Stochastic):
    """Mixin for classes known by name only: the stochastic class is made when it is needed."""

    def __reduce_ex__(self, protocol):
        # Pickle cannot import a class made at run time: it names the two that it is made from.
        mixin, original = type(self).__bases__
        return _empty, (mixin, original), super().__reduce_ex__(2)[2]


@cache
def _stochastic_class(mixin: type, original: type) -> type:
    return type(f"Stochastic{original.__name__}", (mixin, original), {})


def _empty(mixin: type, original: type) -> nn.Module:
    cls = _stochastic_class(mixin, original)
    return cls.__new__(cls)


class NormAct(SwappedClass):
    """timm's batch norm with drop and activation; a synchronised one has them only from timm's
    function for conversion."""

    def finish(self, y: Tensor) -> Tensor:
        for name in ("drop", "act"):
            y = getattr(self, name)(y) if hasattr(self, name) else y
        return y


class Frozen(SwappedClass):
    """torchvision's frozen batch norm: weight, bias and statistics are buffers."""

    def check_input(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(f"expected 4D input (got {x.dim()}D input)")

    def affine_parameters(self) -> tuple[Tensor, Tensor, float]:
        return self.weight, self.bias, getattr(self, "eps", 0.0)


class FrozenNormAct(NormAct, Frozen):
    """timm's frozen batch norm with drop and activation."""


class FrozenOfTransformers(Frozen):
    """Frozen batch norm of the detection models of transformers,
    which write their eps into the forward."""

    def affine_parameters(self) -> tuple[Tensor, Tensor, float]:
        return self.weight, self.bias, 1e-5


def _swap(mixin: type, module: nn.Module) -> nn.Module:
    module.__class__ = _stochastic_class(mixin, type(module))
    return module


_TRANSFORMERS = {
    "conditional_detr": "ConditionalDetr",
    "d_fine": "DFine",
    "dab_detr": "DabDetr",
    "deformable_detr": "DeformableDetr",
    "deimv2": "Deimv2",
    "detr": "Detr",
    "grounding_dino": "GroundingDino",
    "mm_grounding_dino": "MMGroundingDino",
    "pp_doclayout_v2": "PPDocLayoutV2",
    "pp_doclayout_v3": "PPDocLayoutV3",
    "pp_doclayout_v4": "PPDocLayoutV4",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetrV2",
    "table_transformer": "TableTransformer",
}

_BUILT_IN = {
    "timm.layers.norm_act.BatchNormAct2d": NormAct,
    "timm.models.layers.norm_act.BatchNormAct2d": NormAct,
    "timm.layers.norm_act.SyncBatchNormAct": NormAct,
    "timm.layers.norm_act.FrozenBatchNormAct2d": FrozenNormAct,
    "torchvision.ops.misc.FrozenBatchNorm2d": Frozen,
    **{
        f"transformers.models.{model}.modeling_{model}.{prefix}FrozenBatchNorm2d": FrozenOfTransformers
        for model, prefix in _TRANSFORMERS.items()
    },
}
_FROZEN = {name for name, mixin in _BUILT_IN.items() if issubclass(mixin, Frozen)}
for _name, _mixin in _BUILT_IN.items():
    register_adapter(_name, partial(_swap, _mixin))


def is_frozen(module: nn.Module) -> bool:
    """Whether a layer normalises with its own statistics in train() too."""
    return isinstance(module, Frozen) or qualified_name(type(module)) in _FROZEN
