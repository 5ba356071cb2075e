"""What is checked in forwards at the actual size, with the training flags as they are."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor, nn

from ..passes import DoesNotFold
from ..reads import Reads
from ..samplers import Draw
from .carried import CARRIES, Carried
from .mixed import Mixed


class Watch:
    """Around forwards, entered for each of them, the last one that of all replicas together: whether
    values decide what they do next (`Reads`), what one leaves for another (`Carried`), and what is
    made of all replicas (`Mixed`)."""

    def __init__(self, modules: list[nn.Module], reads: Reads, num_samples: int):
        self.reads, self.carried = reads, Carried(modules, reads.is_constant)
        self.mixed = Mixed(reads.is_constant, num_samples, in_step=True)

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for mode in (self.carried, self.reads, self.mixed):
                entered.enter_context(mode)
            self._entered = entered.pop_all()

    def __exit__(self, *error) -> None:
        self._entered.__exit__(*error)

    def draw(self, draw: Draw) -> Draw:
        """The draw for the next forward."""
        return self.mixed.watched(draw)

    def check(self, calls: dict[str, int], outputs: Tensor) -> None:
        """Raises DoesNotFold for any of these; `calls`: rows of stochastic calls, `outputs`: of the
        last forward."""
        self.reads.check(calls)
        if self.carried.found():
            raise DoesNotFold(CARRIES)
        self.mixed.check(outputs)
