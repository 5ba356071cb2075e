"""Parameters moved away from where they are,
for a trial that is to hold wherever training takes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..inputs import map_tensors


class Moved(TorchFunctionMode):
    """Inside, torch's functions are given the parameters of a model moved away from zero.

        p' = p + sign(p) s |u| / 2,   u ~ U(-1, 1),   s = max(rms(p), 1 / sqrt(fan-in)),
             sign(0) = sign(u)

    A gate at zero hides a coupling of the rows from every value, but not from its own gradient. The
    parameters are left alone, for another thread may be using them. What no function of torch in
    Python is given (TorchScript's parameters) stays.

    Args:
        modules: all modules of the model.
    """

    def __init__(self, modules: list[nn.Module]):
        super().__init__()
        parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        # The pairs keep the parameters alive: an id is theirs for as long.
        self.moved = {
            key: (p, _away_from_zero(p)) for key, p in parameters.items() if p.is_floating_point()
        }
        self.met: set[int] = set()

    def unmet(self) -> list[Tensor]:
        """The parameters that no function has been given so far."""
        return [p for key, (p, _) in self.moved.items() if key not in self.met]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map_tensors(args, self._swap), **map_tensors(kwargs or {}, self._swap))

    def _swap(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.moved:
            return tensor
        self.met.add(id(tensor))
        return self.moved[id(tensor)][1]


def _away_from_zero(parameter: Tensor) -> Tensor:
    p = parameter.detach()
    noise = torch.rand(p.shape, generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
    noise = noise.to(p.device, p.dtype)
    fan_in = p[0].numel() if p.dim() > 1 and len(p) else 16
    size = p.double().square().mean().sqrt().clamp(min=max(fan_in, 1) ** -0.5).to(p.dtype)
    return p + torch.where(p == 0, noise.sign(), p.sign()) * size * noise.abs() / 2
