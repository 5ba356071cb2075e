"""What a stochastic layer does now: the current pass, held in a context variable.

Outside every pass a stochastic layer is the layer that it was made from. Inside one it hands its
input to the pass, so that the state of a prediction or a collection lives neither in the model nor
in a global, and threads do not meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.hooks import unserializable_hook

from .calls import call_key, split_key, streams_of
from .checkpoints import remember_in_checkpoint, remembered_in_checkpoint
from .ops.checks import refuse
from .samplers import Draw

_CURRENT: ContextVar[Pass | None] = ContextVar("bnuq_ext_pass", default=None)
_RUNNING: list[Pass] = []  # of all threads
_REPLAYED: WeakValueDictionary[int, Replay] = WeakValueDictionary()  # by the number of a backward
_DYNAMO_READS_CONTEXT = torch.__version__ >= (2, 14)


def current_pass() -> Pass | None:
    """The pass that this thread (or task) is in, or None."""
    # Older dynamo breaks the graph at a context variable; it can guard on a global.
    if not _DYNAMO_READS_CONTEXT and torch.compiler.is_compiling() and not _RUNNING:
        return None
    active = begun_pass()
    return replayed_pass() if active is None else active


def replayed_pass() -> Replay | None:
    """The forward that the backward in this thread computes again, or None."""
    task = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
    if task < 0:
        return None
    done = remembered_in_checkpoint()
    if done is not None:
        return Replay(done, 0)
    replay, node = _REPLAYED.get(task), torch._C._current_autograd_node()
    older = replay is not None and node is not None and node._sequence_nr() < replay.start
    return None if older else replay


class running:  # a context manager; written out, for a generator costs more than a small layer
    """Make a pass the current one for the body.

    Bodies may end in any order: that of a generator does when the generator is closed.
    """

    __slots__ = ("active",)

    def __init__(self, active: Pass):
        self.active = active

    def __enter__(self) -> Pass:
        self.active.around, self.active.ended = begun_pass(), False
        _CURRENT.set(self.active)
        _RUNNING.append(self.active)
        return self.active

    def __exit__(self, *exception) -> None:
        leave_pass(self.active)


def begun_pass() -> Pass | None:
    """The pass that this thread (or task) has begun last, of those that have not ended."""
    return _not_ended(_CURRENT.get())


def _not_ended(active: Pass | None) -> Pass | None:
    """The pass or the first one around it: another thread or task may have ended some, by closing
    the generators that began them."""
    while active is not None and active.ended:
        active = active.around
    return active


def leave_pass(active: Pass) -> None:
    """Ends a pass, also one that is left half, or that was begun in another thread or task."""
    if active in _RUNNING:
        _RUNNING.remove(active)
    active.ended = True
    around, inner = active.around, _CURRENT.get()
    if inner is active:
        _CURRENT.set(around)
    else:
        while inner is not None and inner.around is not active:
            inner = inner.around
        if inner is None:
            return  # begun in another thread or task, which finds what is around by it
        inner.around = around
    active.around = None


def leave_passes(outer: Pass | None) -> None:
    """Ends what this thread has begun since `outer` was its pass."""
    while (active := _CURRENT.get()) is not None and active is not outer:
        leave_pass(active)
    _CURRENT.set(outer)


class Replicated:
    """Mixin of a layer that a pass can run as T replicas; goes before the class it extends.

    A layer has `plain_forward(x)`, what it does outside every pass, and
    `replicate(x, draw, key, stream, shared)`, its rows for all replicas of a draw: x is (N, *) if
    shared, else (T*N, *), replica-major; the result is (T*N, *).
    """

    needs_bank = False  # whether a draw must have statistics for each of its calls
    one_draw = False  # whether all calls in a forward have the noise of the first

    def forward(self, input: Tensor) -> Tensor:  # torch's name, by which it may be given
        if isinstance(input, Proxy):  # torch.fx: one node, as for torch's layers
            tracer = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
        active = current_pass()
        if active is None:
            if not torch.compiler.is_compiling() and _RUNNING:
                _note_missed(self)
            return self.plain_forward(input)
        self.check_input(input)
        return active.visit(self, input)

    def __prepare_scriptable__(self):
        """Called by torch.jit.script, whose language has no passes."""
        advice = "bnuq_ext.revert undoes those of batch norm; torch.jit.trace takes all"
        requirement = f"have no stochastic layers ({advice})"
        refuse("torch.jit.script", "obj", requirement, type(self).__name__, TypeError)

    def plain_forward(self, x: Tensor) -> Tensor:
        """What the class that this one extends does."""
        return super().forward(x)

    def check_input(self, x: Tensor) -> None:
        """Raises, inside a pass, for an x that the original class refuses; here for none."""


def _note_missed(layer: Replicated) -> None:
    """Tells the passes of other threads that a layer of theirs is called outside of them."""
    for active in tuple(_RUNNING):
        name = active.names.get(id(layer))
        if name is not None:
            active.missed.add(name)


class Pass:
    """One forward of a model with its stochastic layers doing something else than usual.

    Args:
        layers: the stochastic layers of the model and their names,
            `named_stochastic_layers(model)`.
        bank: the names of the statistics that are drawn from.

    Attributes:
        streams: `streams_of(layers, bank)`.
        calls: of each layer so far.
        missed: names of layers that were called outside of it.
        around: the pass that was the current one when it began.
        ended: whether it is over, or has not begun.
    """

    around: Pass | None = None
    ended = True

    def __init__(self, layers: dict[str, nn.Module], bank: Iterable[str] = ()):
        self.names = {id(layer): name for name, layer in layers.items()}
        self.streams = streams_of(layers, bank)
        self.calls: dict[str, int] = {}
        self.missed: set[str] = set()

    @property
    def outer(self) -> Pass | None:
        """The pass around it, which other models are left to."""
        return _not_ended(self.around)

    def visit(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What the layer returns for x; a layer of another model behaves as usual."""
        name = self.names.get(id(layer))
        if name is None:
            return layer.plain_forward(x)
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        key = call_key(name, call)
        stream = self.streams[name] + (0 if layer.one_draw else call)
        return self.normalise(layer, x, key, stream)

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        raise NotImplementedError

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        """What a model finds that reads the running_mean or running_var of a layer;
        here the layer's own."""
        return own

    def remarks(self) -> list[str]:
        """Of layers that the forward calls in threads of its own; another thread that uses the model
        as it is calls those of the pass too."""
        names = sorted(self.missed - self.calls.keys())
        if not names:
            return []
        return [
            f"{', '.join(names)}: called in another thread than the forward's, where layers do what they "
            "do in eval; a forward of theirs should call them in its own (others may)"
        ]

    def latest_call(self, layer: nn.Module) -> tuple[str, int] | None:
        """Key and stream of the layer's latest call, or of its first before that; None for a layer
        of another model."""
        name = self.names.get(id(layer))
        if name is None:
            return None
        call = max(self.calls.get(name, 0) - 1, 0)
        return call_key(name, call), self.streams[name] + call


class DoesNotFold(Exception):
    """Replicas cannot go through the model this way; never leaves the package."""


class Undecided(DoesNotFold):
    """A trial on this input could not tell whether they can."""


def refutes(error: Exception | None) -> bool:
    """Whether an error shows that replicas cannot go through a model this way."""
    return isinstance(error, DoesNotFold) and not isinstance(error, Undecided)


class ReplicaPass(Pass):
    """A forward of T replicas: each stochastic call normalises with the statistics of a draw.

    Folded activations are (T*N, C, *), replica-major. Whether the x of a call is shared by the
    replicas or folded is known from the rows that the call had in a pass with T = 1;
    with T = 1 it is the same.

    Args:
        layers: the stochastic layers by the names that the draw's statistics have.
        draw: the statistics of the T replicas.
        rows: rows of x in each call with T = 1; needed for T above 1.
        shared: which calls share x; what is missing is found out. Both are filled by the pass.
        op: who runs it, for messages.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        draw: Draw,
        rows: dict[str, int] | None = None,
        shared: dict[str, bool] | None = None,
        *,
        op: str,
    ):
        super().__init__(layers, draw.tables)
        self.draw, self.op = draw, op
        self.rows = {} if rows is None else rows
        self.shared = {} if shared is None else shared
        self.largest = 0  # bytes of the largest x with T = 1
        self.body: object | None = None  # the `replicas` block that it was started in

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        draw = self.draw
        if layer.needs_bank and key not in draw.tables:
            self._refuse(key, "an additional call")
        if draw.num_samples == 1:
            self.rows[key] = x.shape[0]
            self.largest = max(self.largest, x.numel() * x.element_size())
        remember_in_checkpoint(self)
        shared = draw.num_samples > 1 and self._is_shared(key, x)
        y = layer.replicate(x, draw, key, stream, shared)
        if draw.tap is not None:
            draw.tap(y.unflatten(0, (draw.num_samples, -1)))
        return y

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        """The replica's."""
        latest = self.latest_call(layer)
        if latest is None or latest[0] not in self.draw.tables:
            return own
        if self.draw.num_samples > 1:
            raise DoesNotFold(
                f"its forward reads the {kind} of {latest[0]}, which is another in each replica"
            )
        found = self.draw.statistics(*latest)
        return getattr(found, kind.removeprefix("running_"))[0].to(own)

    def _is_shared(self, key: str, x: Tensor) -> bool:
        rows, recorded, T = x.shape[0], self.rows.get(key), self.draw.num_samples
        shared = rows == recorded
        if not shared and (recorded is None or rows != T * recorded):
            raise DoesNotFold(f"{key} saw {rows} rows instead of {recorded} or {T} times that")
        if self.shared.setdefault(key, shared) != shared:
            raise DoesNotFold(f"{key} saw {rows} rows, which another batch shared or folded")
        return shared

    def follow(self, outputs: list[Tensor], start: int) -> None:
        """Hooks the outputs, so that what a backward from them computes again (activation
        checkpointing) is drawn as in this forward.

        `start` is the number of the first node that may be this forward's. The outputs' grad_fn
        have been asked for, and so brought up to date:
        torch up to 2.14 crashes at a hook where a slice was written.
        """
        replay = Replay(self, start) if outputs else None
        for output in outputs:
            output.register_hook(replay.enter)

    def check_calls(self) -> None:
        """Raises unless the forward made a call at the least, those of the bank, and those of T = 1."""
        made = sum(self.calls.values())
        if not made:
            refuse(self.op, "model", "call a stochastic layer in its forward", "no call")
        if made != len(self.draw.tables):  # equal in a model without other layers
            self._check_against_bank()
        if made != len(self.rows):
            raise DoesNotFold(
                f"the forward made {made} stochastic calls, with T = 1 {len(self.rows)}"
            )

    def _check_against_bank(self) -> None:
        for key in self.draw.tables:
            name, call = split_key(key)
            # A part of a model may be run with the bank of the whole.
            made = self.calls.get(name, 0)
            if name in self.streams and made <= call:
                wanted = sum(split_key(k)[0] == name for k in self.draw.tables)
                self._refuse(name, f"{made} calls instead of {wanted}")

    def _refuse(self, key: str, got: str) -> NoReturn:
        advice = "how often may depend on the number of rows, or on values"
        requirement = f"be called as often as when the bank was collected ({advice})"
        refuse(self.op, f"layer {key!r}", requirement, got)


class Replay(Pass):
    """Parts of a forward that is over, computed again by the backward from its outputs,
    in any order.

    The graph of the forward keeps it alive. A backward through several forwards goes through one
    after another, the last one first, and enters each by its outputs.
    """

    def __init__(self, done: ReplicaPass, start: int):
        self.names, self.streams, self.draw = done.names, done.streams, done.draw
        self.done, self.start = done, start

    @unserializable_hook
    def enter(self, grad: Tensor) -> None:
        """Hook of the outputs."""
        _REPLAYED[torch._C._current_graph_task_id()] = self

    def visit(self, layer: nn.Module, x: Tensor) -> Tensor:
        name, done = self.names.get(id(layer)), self.done
        if name is None:
            return layer.plain_forward(x)
        if not layer.one_draw:
            self._check_once(name)
        remember_in_checkpoint(self.done)  # where one lies in another
        y = layer.replicate(x, self.draw, name, self.streams[name], self._is_shared(name, x))
        if y.requires_grad:
            # A reentrant checkpoint runs a backward of its own,
            # over nodes of the thread that it runs in.
            y.register_hook(Replay(done, 0).enter)
        return y

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        if id(layer) in self.names:
            self._check_once(self.names[id(layer)])
        return self.done.statistic(layer, kind, own)

    def _check_once(self, name: str) -> None:
        calls = self.done.calls.get(name, 0)
        if calls > 1:
            requirement = "be called once in a forward that is computed again"
            refuse(self.done.op, f"layer {name!r}", requirement, f"{calls} calls")

    def _is_shared(self, name: str, x: Tensor) -> bool:
        """Whether the replicas shared an x of these rows, in the calls that had so many."""
        done, T = self.done, self.done.draw.num_samples
        calls = [call_key(name, call) for call in range(done.calls[name])]
        was = {key: done.shared.get(key, True) for key in calls}
        found = {s for key, s in was.items() if x.shape[0] == done.rows[key] * (1 if s else T)}
        if len(found) != 1:
            requirement = "be computed again with rows that tell which of its calls it is"
            refuse(done.op, f"layer {name!r}", requirement, x.shape[0])
        return found.pop()
