"""The trial of a way through a model: a few replicas of three rows,
together and one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..fingerprint import has_hooks
from ..forward import Forward
from ..inputs import expand
from ..interrupts import raise_interrupt
from ..ops.modes import autocast_dtypes, without_autocast
from ..passes import DoesNotFold, Undecided, refutes
from ..reads import Ranges, Reads
from ..restore import forget_casts
from ..samplers import Draw
from .agreement import (
    ALIKE,
    OUTLIER,
    are_unused,
    check_apart,
    check_crowd,
    check_equal,
    check_gradients,
    check_informative,
    check_scaled,
    tolerance_of,
)
from .carried import CARRIES, Carried
from .indices import checked_indices
from .masks import Masks
from .mixed import Mixed
from .moved import Moved
from .probe import CROWD, ROWS, copies_of_last, probe_draws, probe_inputs, varied_probes


class Proof(NamedTuple):
    """What a trial has shown: which calls share their input,
    and whether with moved parameters too."""

    shared: dict[str, bool]
    steady: bool


class Trial(NamedTuple):
    """How to try a way through a model.

    Attributes:
        forward: how to run the model.
        modules: all modules of the model.
        first_replica: from whose statistics those of the trial are made.
        flags: training flags of the modules, if gradients will be taken.
        way: "folded", or "expanded" for inputs with their rows T times over.
        must_tell: whether outputs must tell replicas and rows apart.
    """

    forward: Forward
    modules: list[nn.Module]
    first_replica: int
    flags: tuple[bool, ...] | None
    way: str
    must_tell: bool = True

    def prove(self, inputs) -> Proof:
        """What the trial on three rows of an input shows; raises DoesNotFold or Undecided."""
        probe, made_up = probe_inputs(self.forward.op, inputs)
        try:
            return self._prove(probe)
        except IndexError as error:
            raise_interrupt(error)
            if not made_up:
                raise
            raise Undecided(f"the model takes no rows made up for a trial: {error}") from error

    def _prove(self, probe) -> Proof:
        try:
            return self._examine(probe)
        except Undecided as error:
            # A proof for gradients is renewed under autocast, where it would stay undecided.
            if self.flags is not None or not autocast_dtypes():
                raise
            return self._prove_without_autocast(probe, error)

    def _prove_without_autocast(self, probe, undecided: Undecided) -> Proof:
        """The proof where autocast's rounding hides what tells replicas apart: without it, and with it
        nothing must refute it. Raises `undecided` where the model does not run without."""
        try:
            with without_autocast():
                proof = self._examine(probe)
        except DoesNotFold:
            raise
        except Exception as error:  # 16-bit inputs beside weights of float32
            raise_interrupt(error)
            raise undecided from error
        self._replace(must_tell=False)._examine(probe)
        return proof

    def _examine(self, probe) -> Proof:
        hooked = has_hooks(self.modules, ("_backward_hooks", "_backward_pre_hooks"))
        if hooked and self.flags is not None:
            raise DoesNotFold("a backward hook of a module would see all replicas at once")
        parameters = [list(m.parameters(False)) for m in self.modules]
        with ExitStack() as guarded:
            checks = guarded.enter_context(checked_indices([probe, *parameters]))
            reads = Reads(self.modules, probe, ROWS)
            carried = Carried(self.modules, reads.is_constant)
            masks, mixed = Masks(reads), Mixed(reads.is_constant, 2)
            rows, shared, folded = self._compare(probe, masks, mixed, carried)
            if not checks.met:  # they take half as long again
                guarded.close()
            self._compare_extremes(probe, rows, folded, reads)
            self._compare_varied_flags(probe)
            self._compare_inverted_masks(probe, masks)
            return Proof(shared, self.flags is not None and self._compare_moved(probe))

    def _compare(
        self, probe, mode, mixed: Mixed | None = None, carried: Carried | None = None
    ) -> tuple[dict[str, int], dict[str, bool], Tensor]:
        """Two replicas one after another and together, in `mode`; raises unless they agree. Rows and
        sharing of the stochastic calls, and the outputs together."""
        *alone, both = self._draws()
        runs = []
        for draw in alone:
            with carried or nullcontext():
                runs.append(self._watched(mode, mixed, probe, draw))
        if carried is not None and carried.found():
            raise DoesNotFold(CARRIES)
        loop, rows = torch.cat([output for output, _ in runs]), runs[0][1].rows
        tolerance = tolerance_of(loop, probe, self.modules)
        folded, seen = self._watched(mode, mixed, self._arguments(probe), both, rows)
        check_equal(folded, loop, tolerance)
        if mixed is not None:
            mixed.check(folded)
        if self.must_tell:
            check_informative(torch.stack([output for output, _ in runs]), tolerance)
        return rows, seen.shared, folded

    def _watched(self, mode, mixed: Mixed | None, arguments, draw: Draw, rows=None):
        """One forward inside of both."""
        with mode, mixed or nullcontext():
            return self.forward.run(arguments, mixed.watched(draw) if mixed else draw, rows)

    def _compare_extremes(self, probe, rows: dict[str, int], folded: Tensor, reads: Reads) -> None:
        """The same with infinities (unless all must be finite), rows far out and rows nearly alike,
        where floats that become indices are kept in their range; and with gradients if they will be
        taken."""
        draws, ranges = self._draws(), Ranges() if reads.casts else nullcontext()
        run = self._runner(self._arguments(probe), rows, ranges)
        if reads.casts:  # the first forward has the ranges
            run(draws[-1])
        tolerance = tolerance_of(folded, probe, self.modules)
        check_apart(run, draws[-1], folded, tolerance, reads.finite)
        check_scaled(self._runner(probe, None, ranges), run, draws, folded, tolerance)
        self._compare_crowds(probe, rows, ranges, tolerance)
        if self.flags is not None:
            self._compare_gradients(probe, run, draws)

    def _compare_gradients(self, probe, run: Callable[[Draw], Tensor], draws: list[Draw]) -> None:
        """`run` is of both together."""
        *alone, both = draws
        parameters = [p for m in self.modules for p in m.parameters(False) if p.requires_grad]
        forget_casts()
        with torch.enable_grad():
            loop = torch.cat([self.forward.run(probe, draw)[0] for draw in alone])
            tolerance = tolerance_of(loop, probe, self.modules)
            check_gradients(parameters, run(both), loop, tolerance)

    def _compare_varied_flags(self, probe) -> None:
        """The same where flags are set otherwise."""
        for varied in varied_probes(probe):
            self._try(varied, nullcontext())

    def _compare_inverted_masks(self, probe, masks: Masks) -> None:
        """The same with masks inverted that are false for all rows, and with those that are true;
        outputs need not tell replicas apart then."""
        trial = self._replace(must_tell=False)
        for value in (False, True):
            for places in masks.choices(value):
                reads = Reads(self.modules, probe, ROWS)
                inverted = Masks(reads, masks.found, places)
                trial._try(probe, inverted, Mixed(reads.is_constant, 2))

    def _try(self, probe, mode, mixed: Mixed | None = None) -> None:
        """Compares, unless the model does not take such numbers."""
        try:
            self._compare(probe, mode, mixed)
        except Exception as error:
            raise_interrupt(error)
            if refutes(error):
                raise

    def _compare_moved(self, probe) -> bool:
        """Whether the trial could be made with other values of all parameters that count; it must
        not fail."""
        try:
            moved = Moved(self.modules)
            self._compare(probe, moved)
            unmet = [p for p in moved.unmet() if p.requires_grad]
            return not unmet or self._are_unused(unmet, probe)
        except Exception as error:
            raise_interrupt(error)
            if refutes(error):
                raise
            return False

    def _are_unused(self, parameters: list[Tensor], probe) -> bool:
        """Whether the outputs are seen to depend on none of them: a head that is not called, the
        noise of a likelihood. Of a module with zeros alone it is not known: one may be a gate of
        train()."""
        given = {id(p) for p in parameters}
        owned = [[p for p in m._parameters.values() if id(p) in given] for m in self.modules]
        if not all(any(p.any() for p in own) for own in owned if own):
            return False
        forget_casts()
        with torch.enable_grad():
            output, _ = self.forward.run(probe, self._draws()[0])
        return are_unused(parameters, output)

    def _compare_crowds(self, probe, rows: dict[str, int], ranges, tolerance: float) -> None:
        twins = all(layer.needs_bank for layer in self.forward.layers.values())
        for crowd, given in ((OUTLIER, probe), (ALIKE, copies_of_last(probe))):
            alone = self._runner(given, None, ranges)
            together = self._runner(self._arguments(given, CROWD), rows, ranges)
            check_crowd(alone, together, self._draws(CROWD), tolerance, twins, crowd)

    def _runner(self, arguments, rows: dict[str, int] | None, ranges) -> Callable[[Draw], Tensor]:
        def run(draw: Draw) -> Tensor:
            with ranges:
                return self.forward.run(arguments, draw, rows)[0]

        return run

    def _draws(self, num_samples: int = 2) -> list[Draw]:
        return probe_draws(self.forward.draw(self.first_replica, 1), num_samples)

    def _arguments(self, probe, num_samples: int = 2):
        return probe if self.way == "folded" else expand(self.forward.op, probe, num_samples)
