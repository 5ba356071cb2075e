"""A bank and the model whose layers it has the statistics of."""

from torch import nn

from .bank import Bank
from .batch_norm_like import listed
from .calls import split_key
from .nn import named_stochastic_layers, require_stochastic_layers
from .ops.checks import refuse
from .state import OWN_BANK


def attach(model: nn.Module, bank: Bank) -> None:
    """Give a converted model a bank: `predict` then draws from it.

    Args:
        model: holds stochastic layers.
        bank: has the statistics of exactly these layers, with their numbers of channels.

    Raises:
        TypeError: bank is no Bank. ValueError: the layers' names or channels differ, or the bank's
            tensors were changed into what no bank holds. The model is then left as it was.
    """
    if not isinstance(bank, Bank):
        refuse("attach", "bank", "be a Bank", type(bank).__name__, TypeError)
    layers = require_stochastic_layers("attach", model)
    _check_layers(layers, bank)
    bank.check()
    before = [(layer, layer.bank, layer.bank_name) for layer in layers.values()]
    try:
        for name, layer in layers.items():
            layer.bank, layer.bank_name = bank, name
    except BaseException:
        for layer, old, name in before:
            layer.bank, layer.bank_name = old, name
        raise
    vars(model)[OWN_BANK] = bank


def find_bank(model: nn.Module, op: str) -> Bank:
    """The bank of a model, for the op that needs it.

    Raises:
        ValueError: no stochastic layers, a layer without a bank, layers with different banks, or
            with the same statistics of one.
    """
    layers = require_stochastic_layers(op, model)
    banks = {id(layer.bank): layer.bank for layer in layers.values()}
    if id(None) in banks:
        refuse(op, "model", "have a bank", "none; run bnuq_ext.collect first")
    if len(banks) > 1:
        got = f"{len(banks)}; run bnuq_ext.collect on the whole model"
        refuse(op, "model", "have one bank in all layers", got)
    if len({layer.bank_name for layer in layers.values()}) < len(layers):
        got = "the same in two; run bnuq_ext.collect on the whole model"
        refuse(op, "model", "have statistics of its own in each layer", got)
    return next(iter(banks.values()))


def remarks_on_gone_layers(model: nn.Module, bank: Bank) -> list[str]:
    """What to say of the layers of its bank that a model had when it was given it, and has no
    longer: frozen, merged or taken out. A part of a model is run with the bank of the whole."""
    if vars(model).get(OWN_BANK) is not bank:
        return []
    # By the names that they had then: a wrapper gives them others.
    layers = {m.bank_name: m for m in named_stochastic_layers(model).values() if m.bank is bank}
    gone = sorted({*_layer_names(layers, bank).values(), *bank.unused} - layers.keys())
    if not gone:
        return []
    return [
        f"the model no longer has the layers {listed(gone)} of its bank as stochastic ones; "
        "what it does there is the same in all replicas"
    ]


def _layer_names(layers: dict[str, nn.Module], bank: Bank) -> dict[str, str]:
    """The layer of each call of a bank."""
    return {key: key if key in layers else split_key(key)[0] for key in bank.names}


def _check_layers(layers: dict[str, nn.Module], bank: Bank) -> None:
    names = _layer_names(layers, bank)
    known = {*names.values(), *bank.unused}
    extra, missing = sorted(known - layers.keys()), sorted(layers.keys() - known)
    if extra or missing:
        parts = [f"lacks {listed(missing)}"] * bool(missing)
        parts += [f"has {listed(extra)} besides"] * bool(extra)
        got = f"one that {' and '.join(parts)}"
        refuse("attach", "bank", "have the statistics of the model's layers", got)
    for key, name in names.items():
        layer, num_channels = layers[name], bank.mean[key].shape[1]
        expected = _num_channels(layer)
        if expected is not None and num_channels != expected:
            refuse("attach", f"bank.mean[{key!r}]", f"have {expected} channels", num_channels)


def _num_channels(layer: nn.Module) -> int | None:
    """C, where an adapter's class tells it."""
    if getattr(layer, "num_features", None):
        return layer.num_features
    tensors = (getattr(layer, "running_mean", None), *layer.affine_parameters()[:2])
    return next((t.numel() for t in tensors if t is not None), None)
