"""Context managers that leave a model and the random number generators as they found them."""

import random
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from .forks import free_in_children
from .state import State, is_training, kept, modules_of
from .warn import warn


@dataclass(slots=True)
class _Held:
    """A module in eval: for how many bodies, and its flag before the first; also its state, where its
    class has a train() of its own."""

    users: int
    training: bool
    state: State | None


_EVAL_LOCK = free_in_children(threading.Lock())
_EVAL_USERS: dict[int, _Held] = {}
_INTERRUPTS = 8  # that flags and generators are put back in spite of
# Of other packages; those of transformers change kernels too, of a model that was told to use some.
_FLAGS_ALONE = {f"transformers.modeling_utils.PreTrainedModel.{name}" for name in ("train", "eval")}
_WARNED_OF: WeakSet[type[nn.Module]] = WeakSet()


def evaluating(modules: list[nn.Module], *, warns: bool = True):
    """All modules of a model in eval for the body; each one's own flag is put back,
    however it ends.

    The flags are set directly: a module's own train() or eval() may do more than that (merge
    weights, freeze layers), which nothing could undo, so a class with one is warned of, once, if
    `warns`; what such a module keeps in eval (a cache that its train() would empty) is put back
    with its flag, unless the body has rebuilt it (hooks, submodules). Where threads share modules,
    the last one to leave does so.
    """
    with _EVAL_LOCK:
        if not _EVAL_USERS and not any([is_training(module) for module in modules]):
            return nullcontext()  # in eval already, and no other body will put flags back
    own = {cls for cls in {type(m) for m in modules} if _has_own_modes(cls)}
    told = own & {type(m) for m in modules if is_training(m)}
    if warns and (new := {cls for cls in told if cls not in _WARNED_OF}):  # others may add to it
        _WARNED_OF.update(new)
        names = ", ".join(sorted(cls.__name__ for cls in new))
        warn(
            f"in train() with a train() or eval() of its own: {names}; only its flag is set; "
            "if that method does more than set flags, call the model's eval() before"
        )
    return _held_in_eval([m for m in modules if hasattr(m, "training")], own)


def _has_own_modes(cls: type[nn.Module]) -> bool:
    """Whether train() or eval() of a class are neither torch's nor this package's."""
    return not all(_only_sets_flags(getattr(cls, name, None)) for name in ("train", "eval"))


def _only_sets_flags(method) -> bool:
    home = getattr(method, "__module__", None) or ""
    known = f"{home}.{getattr(method, '__qualname__', '')}" in _FLAGS_ALONE
    return known or home.partition(".")[0] in ("torch", __package__)


@contextmanager
def _held_in_eval(modules: list[nn.Module], own: set[type[nn.Module]]):
    entered = []
    try:
        for module in modules:
            with _EVAL_LOCK:
                entered.append(module)  # first: an interrupt may come after any line
                held = _EVAL_USERS.get(id(module)) or _first_held(module, own, modules)
                held.users += 1
                _EVAL_USERS[id(module)] = held
                module.training = False
        yield
    finally:
        _undo(entered, _leave)


def _undo(entries: list, undo: Callable) -> None:
    """Takes entries out, the last one first, after an `undo(entry)` that was not interrupted; raises
    an interrupt at the end, or an error if there was none."""
    interrupts: list[BaseException] = []
    while entries and len(interrupts) < _INTERRUPTS:
        try:
            while entries:
                undo(entries[-1])
                entries.pop()
        except BaseException as error:  # of a signal's handler; it must not cost what is left
            interrupts.append(error)
    if interrupts:
        raise min(interrupts, key=lambda error: isinstance(error, Exception))


def _leave(module: nn.Module) -> None:
    """Puts the flag back where no other body needs it. (torch.compile's wrapper has none of its own:
    it sets the next's.)"""
    with _EVAL_LOCK:
        held = _EVAL_USERS.get(id(module)) or _Held(1, module.training, None)
        if held.users > 1:
            held.users -= 1
        else:
            if held.state is not None and not held.state.rebuilt():
                held.state.restore()
            module.training = held.training
            _EVAL_USERS.pop(id(module), None)


def _first_held(module: nn.Module, own: set[type[nn.Module]], modules: list[nn.Module]) -> _Held:
    """`modules`: of the model, whose state is no part of this one's."""
    changes_more = module.training and type(module) in own
    state = State([module], modules_of(module), modules, followed=False) if changes_more else None
    return _Held(0, module.training, state)


@contextmanager
def preserved_rng(*generators):
    """The states of torch's, numpy's and Python's global generators,
    and of the given ones of any of these kinds, put back.

    A loader draws its order from them and transforms draw from them.
    CUDA's generators are looked at only where CUDA has started.

    Yields what puts them back, which a body that lets them go clears.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    before = [  # a GPU may refuse after an error, a given one too: first, to be put back last
        *(partial(torch.cuda.set_rng_state, state, device) for device, state in enumerate(cuda)),
        *map(kept, generators),
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(np.random.set_state, np.random.get_state()),
        partial(random.setstate, random.getstate()),
    ]
    try:
        yield before
    finally:
        _undo(before, lambda put_back: put_back())


def seed_torch(seed: int) -> None:
    """torch.manual_seed, of what `preserved_rng` puts back: for CUDA that has not started torch would
    keep the seed."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def unmoved_by_errors():
    """An error in the body, which draws a key or whose forward draws numbers, leaves torch's generator
    of the CPU as it was. A GPU's may be part of a CUDA graph, where nothing asks for its state.
    """
    traced = torch.compiler.is_compiling()  # which cannot ask for the state
    return nullcontext() if traced else _Unmoved()


class _Unmoved:
    """Written out, for a generator costs more than a small layer."""

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()

    def __exit__(self, error, *others) -> None:
        if error is not None:
            torch.set_rng_state(self.state)


def random_states() -> list:
    """The states that `preserved_rng` puts back, for `drawn_since`; those of GPUs,
    once there are any, last."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    _, words, *legacy = np.random.get_state()
    return [words.tobytes(), *legacy, random.getstate(), torch.get_rng_state(), *cuda]


def drawn_since(before: list) -> bool:
    """Whether a generator of `random_states` has moved;
    one of a GPU that torch has begun to use since has not."""
    pairs = [*zip(random_states(), before, strict=False)]
    return any(
        not torch.equal(now, then) if isinstance(now, torch.Tensor) else now != then
        for now, then in pairs
    )


@contextmanager
def one_thread():
    """Torch computes in one thread in the body."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_gradients():
    """No autograd graph, and ordinary tensors even where the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def unhooked_saving():
    """Hides what a trial saves for a backward from hooks of the caller: a checkpoint around the call
    counts saved tensors, and makes no trial when it computes again."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # then there are none
        yield
        return
    # A node that was given back its own output would keep itself alive.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
        yield


def forget_casts() -> None:
    """Empties autocast's cache: in older torch casts of weights that were made without gradients would
    serve forwards with them, and the weights get none."""
    if torch._C._is_any_autocast_enabled():
        torch.clear_autocast_cache()


def cached_weights() -> set:
    """The keys of the cache of torch's `parametrize.cached()`, for `forget_cached`."""
    return set(parametrize._cache) if parametrize._cache_enabled else set()


def forget_cached(before: set) -> None:
    """Where gradients are taken, takes weights out of that cache that forwards without gradients have
    put there since; others stay, for they may be random."""
    if parametrize._cache_enabled and torch.is_grad_enabled():
        for place, weight in [*parametrize._cache.items()]:
            if place not in before and not getattr(weight, "requires_grad", False):
                parametrize._cache.pop(place, None)


@contextmanager
def uncached():
    """What torch's `parametrize.cached()` keeps is neither used nor added to, and autocast keeps
    nothing: the weights of a trial have no gradients."""
    entered, cache = parametrize._cache_enabled, parametrize._cache
    if entered:
        parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        if entered:
            parametrize._cache_enabled += entered  # another thread may have entered, or left
            parametrize._cache = cache if parametrize._cache_enabled else {}
        forget_casts()
