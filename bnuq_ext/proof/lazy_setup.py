"""What only the first forward of a model does to it, which stays; what every forward does, a trial
takes back.

A model may install hooks, make submodules or merge weights in its first forward, and remember that it
has: often in an attribute, which can be put back, but it may be anywhere. A count of its calls
changes in every forward.
"""

from __future__ import annotations

from torch import nn

from ..contents import copy_of
from ..fingerprint import fingerprint
from ..restore import drawn_since, preserved_rng, random_states
from ..state import State, modules_of


def keep_lazy_setup(folding, first: State, generators: list) -> bool:
    """After a forward that has changed the model: lets what only a first one does stay, and returns
    whether there was any.

    Args:
        folding: whose forward it was.
        first: the state before, to which the caller returns if nothing is to stay.
        generators: what puts back those of random numbers; cleared where weights have been drawn.
    """
    modules = modules_of(folding.forward.model)
    with preserved_rng():  # as the first forward has left them
        after, second = random_states(), State(modules)
        for put_back in generators:
            put_back()
        before = random_states()
        changed, rebuilt = _again(folding, second, modules)
        drawn_once = drawn_since(after)
        if drawn_once and first.completed():  # the weights of lazy layers, which stay
            generators.clear()
        if rebuilt or (changed and not first.rebuilt()):
            return False
        each_time = changed or (drawn_once and drawn_since(before))
        if each_time and first.rebuilt() and not _remembers_elsewhere(folding, first, second):
            return False
    if drawn_once:
        generators.clear()
    folding.cache.restart(fingerprint(folding.modules))
    return True


def _again(folding, state: State, modules: list[nn.Module]) -> tuple[bool, bool]:
    """Whether one more forward changes the model, and whether it rebuilds it; it is undone."""
    seen, changed = fingerprint(modules), True
    try:
        folding.record(state)
        changed = fingerprint(modules) != seen or state.written()
        return changed, state.rebuilt()
    finally:
        if changed:
            state.restore()


def _remembers_elsewhere(folding, first: State, second: State) -> bool:
    """Of a model that was rebuilt once and changes each time: whether it is not rebuilt again where
    all is as before, for what it remembers is not put back. It is left as by its first forward."""
    second.follow({p: copy_of(p) for copies in first.overwritten for p in copies})
    first.restore()
    folding.record(first)
    if first.rebuilt():
        return False
    second.restore()
    return True
