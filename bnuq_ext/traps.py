"""What is known to go wrong with batch norm, looked for in a model: the warnings of `doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .adapters import is_frozen
from .attach import remarks_on_gone_layers
from .bank import Bank
from .batch_norm_like import listed
from .calls import call_key
from .dropout import DROPOUTS
from .inputs import tensors
from .nn import Stochastic, uncompiled_name

_SMALL = 16  # rows
# Root mean square over the channels of a layer, in running standard deviations. Measured on eight
# small networks: up to 0.22 for the bank of a network after one epoch of training and 0.09 after
# more, 0.26 to 0.83 after twenty epochs more, 0.39 and above for the bank of another training.
_FAR = 0.25


class DropoutTrace(TorchFunctionMode):
    """Follows what comes out of dropout through a forward, in eval too, into batch norm.

    Attributes:
        after: names of the batch-norm layers whose input depends on a dropout with p above 0,
            in the order of their calls.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.after: dict[str, None] = {}
        self._dropped = WeakIdKeyDictionary()
        self._owner = {
            id(tensor): uncompiled_name(name)
            for name, module in model.named_modules()
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in DROPOUTS and kwargs.get("p", args[1] if len(args) > 1 else 0.5) > 0:
            # In eval the output is the input itself, which others may use without dropout.
            output = output.view_as(output)
            self._dropped[output] = None
        elif any(tensor in self._dropped for tensor in tensors((args, kwargs))):
            if func is F.batch_norm:
                self.after[self._name((*args, *kwargs.values()))] = None
            for tensor in tensors(output):
                self._dropped[tensor] = None
        return output

    def _name(self, arguments: tuple) -> str:
        names = (self._owner.get(id(a)) for a in arguments if isinstance(a, Tensor))
        return next((name for name in names if name is not None), "one without parameters")


def warnings_of(model: nn.Module, after_dropout: list[str]) -> Iterator[str]:
    """What the user should know, one sentence each.

    Args:
        model: with the training flags that the user gave it.
        after_dropout: `DropoutTrace.after`.
    """
    if after_dropout:
        yield (
            f"batch norm after dropout: {listed(after_dropout)}. Dropout changes the variance from train() to "
            "eval(), so the running statistics do not fit; keep dropout behind the last batch norm"
        )
    modules = model.named_modules()
    norms = {uncompiled_name(n): m for n, m in modules if isinstance(m, (_BatchNorm, Stochastic))}
    training = [name for name, m in norms.items() if m.training and not is_frozen(m)]
    if training:
        yield (
            f"batch norm in train(): {listed(training)}. Outside predict a forward normalises with its own "
            "batch and moves the running statistics, with no_grad and requires_grad_(False) too; call eval(), "
            "or bnuq_ext.freeze to train the rest"
        )
    banks = {id(m.bank): m.bank for m in norms.values() if getattr(m, "bank", None) is not None}
    for bank in banks.values():
        yield from _warnings_of_sizes(bank)
        yield from remarks_on_gone_layers(model, bank)
    far = [name for name, layer in norms.items() if _gap(layer) > _FAR]
    if far:
        yield (
            f"bank far from the running statistics: {listed(far)}. It is of other data, of another training or of "
            "an earlier state of this one (collect again), or weights still moved fast when training ended"
        )


def _warnings_of_sizes(bank: Bank) -> Iterator[str]:
    if bank.batch_size <= _SMALL:
        yield (
            f"small batches: the bank's have {bank.batch_size} rows. With {_SMALL} or fewer the statistics are "
            "noisy and predictions were found to be worse (Teye et al. 2018); good if the model was "
            "trained with such batches"
        )
    last, rows = bank.count_last_batches()
    if last and rows <= bank.batch_size // 2:
        yield (
            f"small last batches: {last} of the bank's {len(bank)} snapshots have {rows} rows, the others "
            f"{bank.batch_size}. Their statistics are noisier, and so are the replicas that use them; "
            "drop_last=True of the loader leaves them out"
        )


def _gap(layer: nn.Module) -> float:
    """How far the mean of the bank's means lies from a layer's running mean;
    0 where that cannot be told."""
    bank, name = getattr(layer, "bank", None), getattr(layer, "bank_name", None)
    if bank is None or name not in bank.mean or call_key(name, 1) in bank.mean:
        return 0.0
    running_mean = getattr(layer, "running_mean", None)
    if running_mean is None or not getattr(layer, "num_batches_tracked", None):
        return 0.0  # or they have never been updated
    gap = bank.mean[name].mean(0).to(running_mean) - running_mean
    return float((gap.square() / (layer.running_var + layer.eps)).mean().sqrt())
