"""One forward of a model with replicas in its stochastic layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from .history import made_since, next_node
from .inputs import call, copied
from .model_cache import ChainCache, ModelCache
from .ops.checks import refuse
from .passes import ReplicaPass, running
from .samplers import Draw, Sampler
from .untraced import unrecorded


class Forward(NamedTuple):
    """How to run a model: what is the same for every chunk of a prediction."""

    model: nn.Module
    layers: dict[str, nn.Module]
    sampler: Sampler
    key: int | Tensor  # what the sampler's draw takes
    output_fn: Callable | None
    cache: ModelCache | ChainCache
    op: str = "predict"
    call: Callable = call

    def draw(self, first_replica: int, num_samples: int) -> Draw:
        with unrecorded():
            return self.sampler.draw(self.key, first_replica, num_samples)

    def run(self, inputs, draw: Draw, rows=None, shared=None) -> tuple[Tensor, ReplicaPass]:
        """One forward: its output, and what the stochastic calls saw."""
        active = ReplicaPass(self.layers, draw, rows, shared, op=self.op)
        start = next_node()
        with running(active), self.cache.checking_coverage(self.op, self.model, self.layers):
            output = self.call(self.model, copied(inputs))
        active.check_calls()
        self.cache.warn_of_missed(self.op, active)
        output = self.tensor_of(output)
        active.follow(made_since(start, self.model, [output]), start)
        return output, active

    def tensor_of(self, output) -> Tensor:
        name = "the model's output"
        if self.output_fn is not None:
            output, name = self.output_fn(output), "output_fn's result"
        if not isinstance(output, Tensor):
            hint = "; output_fn takes one out of it" if self.output_fn is None else ""
            got = type(output).__name__ + hint
            refuse(self.op, name, "be a tensor", got, TypeError)
        if not output.is_floating_point():
            refuse(self.op, name, "be a floating-point tensor", output.dtype, TypeError)
        return output
