"""What a forward leaves for the next one, wherever that is held."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..contents import version_of
from ..inputs import tensors

CARRIES = "its forward computes with a tensor that an earlier one has left in a hook, an object or a global"
_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__


class Carried(TorchFunctionMode):
    """Around forwards, entered for each of them: whether one computes with a tensor that an earlier
    one has made, or writes into one that none of them has made.

    A largest value of all that was ever seen is such a tensor, or a memory bank. A trial would leave
    its own values there. Parameters and buffers are no concern of this, for they are put back.

    Args:
        modules: all modules of the model.
        is_constant: whether a tensor is the same whatever the rows are; a cache of such may be used.
    """

    def __init__(self, modules: list[nn.Module], is_constant: Callable[[Tensor], bool]):
        super().__init__()
        self.is_constant = is_constant
        self.own = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        self.earlier, self.made = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        # Of what was made elsewhere, by address: the tensor and its aliases, each with its version.
        self.met_earlier: dict[int, list[tuple[Tensor, int]]] = {}
        self.met: dict[int, list[tuple[Tensor, int]]] = {}
        self.used = False

    def __enter__(self):
        self.earlier.update(self.made)  # what has been let go of is not in there
        self.made = WeakTensorKeyDictionary()
        self.met_earlier, self.met = self.met_earlier | self.met, {}
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in tensors((args, kwargs)) if id(t) not in self.own]
        for t in given:
            if t not in self.made and t not in self.earlier:
                self.met.setdefault(id(t), [(t, version_of(t))])
        result = func(*args, **kwargs)
        made = tensors(result)
        if made:  # not of a question for a shape
            self.used |= any(t in self.earlier and not self.is_constant(t) for t in given)
        if func == _SET_DATA:
            self.used |= id(args[0]) in self.met_earlier
        if func == _DATA and id(args[0]) in self.met:  # an alias that counts versions of its own
            self.met[id(args[0])].append((result, version_of(result)))
        else:
            self.made.update({t: True for t in made if not any(t is g for g in given)})
        return result

    def found(self) -> bool:
        again = self.met.keys() & self.met_earlier.keys()
        aliases = [pair for key in again for pair in (*self.met[key], *self.met_earlier[key])]
        return self.used or any(version_of(t) != version for t, version in aliases)
