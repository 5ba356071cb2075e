"""Many small regression networks trained at once, each as if it were alone.

A step of a network of 50 units is a few microseconds of arithmetic inside hundreds of dispatch.
Here every tensor carries S networks in its first dimension, activations lie as (S, units, rows) so
that a batched product feeds a batch norm over contiguous rows, the backward pass is written out
over buffers that are made once, and Adam runs over one flat vector. On the CPU, in one thread.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..experiments.fitting import batch_norm_chain
from ..ops.checks import check_integer, check_shape, refuse

EPS = 1e-10  # of the batch norm, as in the code of Teye et al. (2018)


class Network(NamedTuple):
    """What one network of a stack has for itself.

    Attributes:
        seed: of its initial weights, its order of rows and its dropout.
        weight_decay: lambda in the loss mean (f - y)^2 / 2 + lambda ||weights||^2 / 2.
        dropout: the rate before each Linear, the input included;
            None is batch norm without dropout.
    """

    seed: int
    weight_decay: float
    dropout: float | None = None


def plain_network(num_features: int, hidden: int, dropout: float | None = None) -> nn.Sequential:
    """(Linear, BatchNorm1d, ReLU) twice and a Linear,
    or the same with Dropout before each Linear and no BN."""
    if dropout is None:
        return batch_norm_chain(num_features, (hidden, hidden), 1, eps=EPS)
    layers = []
    for i, o in pairwise((num_features, hidden, hidden)):
        layers += [nn.Dropout(dropout), nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(hidden, 1))


class Stack:
    """S networks of one architecture and their parameters.

    Weights are drawn from N(0, 0.1^2) cut at two standard deviations; scales are 1,
    shifts and biases 0.

    Args:
        networks: S of them, all with batch norm or all with dropout.
        num_features: Q.
        hidden: H, units of each of the two hidden layers.

    Attributes:
        parameters: name -> (S, ...); views of one vector.
    """

    def __init__(self, networks: Sequence[Network], num_features: int, hidden: int):
        if not networks:
            refuse("Stack", "networks", "hold a network", len(networks))
        if len({network.dropout is None for network in networks}) == 2:
            refuse("Stack", "networks", "all have dropout or none", [n.dropout for n in networks])
        self.networks, self.hidden = list(networks), check_integer("Stack", "hidden", hidden, 1)
        self.num_features = check_integer("Stack", "num_features", num_features, 1)
        self.batch_norm = networks[0].dropout is None
        self.flat = torch.zeros(sum(map(math.prod, self._shapes().values())))
        self.parameters = self.views(self.flat)
        self.generators = [np.random.Generator(np.random.SFC64(n.seed)) for n in networks]
        self._initialise()

    def __len__(self) -> int:
        return len(self.networks)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        S, Q, H = len(self), self.num_features, self.hidden
        shapes = {"weight0": (S, H, Q), "weight1": (S, H, H), "weight2": (S, 1, H)}
        if self.batch_norm:
            shapes |= {"scale0": (S, H, 1), "scale1": (S, H, 1)}
        return shapes | {"shift0": (S, H, 1), "shift1": (S, H, 1), "shift2": (S, 1, 1)}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters, or what stands in the same places of another vector."""
        shapes = self._shapes()
        parts = flat.split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    def _initialise(self) -> None:
        low = torch.special.ndtr(torch.tensor(-2.0, dtype=torch.float64))
        for name, parameter in self.parameters.items():
            if name.startswith("scale"):
                parameter.fill_(1.0)
            elif name.startswith("weight"):
                for one, rng in zip(parameter, self.generators, strict=True):
                    u = low + (1 - 2 * low) * torch.from_numpy(rng.random(one.shape))
                    one.copy_(0.1 * torch.special.ndtri(u))

    @torch.no_grad()
    def predict(self, x: Tensor, train: Tensor) -> Tensor:
        """Outputs of the networks in eval, one after another.

        Args:
            x: (S, m, Q) inputs of each network.
            train: (S, n, Q) rows whose statistics the batch norms take.

        Returns:
            (S, m).
        """
        return torch.stack([self._predict(s, x[s], train[s]) for s in range(len(self))])

    def _predict(self, s: int, x: Tensor, train: Tensor) -> Tensor:
        p = {name: parameter[s] for name, parameter in self.parameters.items()}
        n = len(train) if self.batch_norm else 0
        h = torch.cat([train[:n], x]).T
        for i in range(2):
            h = p[f"weight{i}"] @ h
            if self.batch_norm:
                h -= h[:, :n].mean(1, keepdim=True)
                var = h[:, :n].square().mean(1, keepdim=True)
                h *= p[f"scale{i}"] * (var + EPS).rsqrt()
            h = h.add_(p[f"shift{i}"]).clamp_min_(0)
        return (p["weight2"] @ h[:, n:] + p["shift2"]).squeeze(0)

    def network(self, s: int, x: Tensor) -> nn.Sequential:
        """Network s by itself, in eval.

        Args:
            x: (n, Q) rows whose mean and biased variance, layer by layer, become the running
                statistics; without batch norm they are not looked at.
        """
        net = plain_network(self.num_features, self.hidden, self.networks[s].dropout)
        linears = [m for m in net if isinstance(m, nn.Linear)]
        norms = [m for m in net if isinstance(m, nn.BatchNorm1d)]
        p = {name: parameter[s] for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for i, linear in enumerate(linears):
                linear.weight.copy_(p[f"weight{i}"])
                if linear.bias is not None:
                    linear.bias.copy_(p[f"shift{i}"].squeeze(1))
            for i, norm in enumerate(norms):
                norm.weight.copy_(p[f"scale{i}"].squeeze(1))
                norm.bias.copy_(p[f"shift{i}"].squeeze(1))
            net.eval()
            if norms:
                take_statistics(net, x)
        return net


def take_statistics(net: nn.Sequential, x: Tensor) -> None:
    """Sets the running statistics of a chain's batch norms to those of x (n, Q),
    the deeper behind the first."""
    for module in net:
        if isinstance(module, nn.BatchNorm1d):
            var, mean = torch.var_mean(x, 0, correction=0)
            module.running_mean.copy_(mean)
            module.running_var.copy_(var)
        x = module(x)


class Training:
    """The training of a stack by Adam with rate 0.001, which goes on with every `run`.

    Network s sees in every epoch all its rows in a new order, in batches of M without the rest, and
    minimises mean (f - y)^2 / 2 + weight_decay / 2 ||weights||^2.
    It takes the same course in any stack, to rounding.

    Args:
        stack: its parameters are changed in place.
        x: (S, n, Q) float32 inputs of each network.
        y: (S, n) float32 targets.
        batch_size: M, 2 to n.
    """

    def __init__(self, stack: Stack, x: Tensor, y: Tensor, batch_size: int):
        S, n = len(stack), x.shape[1]
        check_shape("Training", "x", x, (S, n, stack.num_features))
        check_shape("Training", "y", y, (S, n))
        if check_integer("Training", "batch_size", batch_size, 2) > n:
            refuse("Training", "batch_size", f"be at most the {n} rows", batch_size)
        self.stack, self.x, self.y, self.batch_size = stack, x, y, batch_size
        self.gradient = torch.zeros_like(stack.flat)
        self.gradients = stack.views(self.gradient)
        self.decay = torch.zeros_like(stack.flat)
        for name, part in stack.views(self.decay).items():
            if name.startswith("weight"):
                part.copy_(torch.tensor([n.weight_decay for n in stack.networks]).view(S, 1, 1))
        stack.flat.grad = self.gradient
        self.optimizer = torch.optim.Adam([stack.flat], 1e-3, fused=True)
        self._make_buffers(S, batch_size)

    def _make_buffers(self, S: int, M: int) -> None:
        H, Q = self.stack.hidden, self.stack.num_features
        self.normal = torch.empty(2, S, H, M)  # the normalised, or dropped-out, inputs of each ReLU
        self.active = torch.empty(2, S, H, M)
        self.slope, self.product = torch.empty(2, S, H, M)
        self.rstd = torch.empty(2, S, H, 1)
        self.residual = torch.empty(S, 1, M)
        self.which = torch.arange(S)[:, None]
        if not self.stack.batch_norm:
            self.masks = torch.empty(S, Q + 2 * H, M)
            self.rates = torch.tensor([n.dropout for n in self.stack.networks]).view(S, 1, 1)

    @torch.no_grad()
    def run(self, epochs: int) -> None:
        """Trains for so many epochs more."""
        n, M = self.x.shape[1], self.batch_size
        for _ in range(epochs):
            orders = [rng.permutation(n) for rng in self.stack.generators]
            rows = torch.from_numpy(np.stack(orders))
            for first in range(0, n - M + 1, M):
                batch = rows[:, first : first + M]
                self._step(self.x[self.which, batch], self.y[self.which, batch])

    def _step(self, x: Tensor, y: Tensor) -> None:
        """One step on (S, M, Q) and (S, M)."""
        p, g = self.stack.parameters, self.gradients
        inputs, masks = x.transpose(1, 2), None
        if not self.stack.batch_norm:
            masks = self._draw_masks()
            inputs = inputs * masks[0]
        first = self._hidden(0, inputs, masks)
        second = self._hidden(1, first, masks)
        torch.baddbmm(p["shift2"], p["weight2"], second, out=self.residual)
        self.residual.sub_(y.unsqueeze(1)).div_(self.batch_size)

        torch.sum(self.residual, 2, keepdim=True, out=g["shift2"])
        torch.bmm(self.residual, second.transpose(1, 2), out=g["weight2"])
        torch.mul(p["weight2"].transpose(1, 2), self.residual, out=self.slope)
        self._hidden_backward(1, first, masks)
        torch.bmm(p["weight1"].transpose(1, 2), self.product, out=self.slope)
        self._hidden_backward(0, inputs, masks)
        self.gradient.addcmul_(self.decay, self.stack.flat)
        self.optimizer.step()

    def _draw_masks(self) -> tuple[Tensor, ...]:
        """0 at the network's rate, else 1 / (1 - rate), for the inputs of each Linear."""
        for rng, mask in zip(self.stack.generators, self.masks.numpy(), strict=True):
            rng.random(out=mask, dtype=np.float32)
        torch.ge(self.masks, self.rates, out=self.masks)
        self.masks.div_(1 - self.rates)
        H = self.stack.hidden
        return self.masks.split([self.stack.num_features, H, H], 1)

    def _hidden(self, i: int, inputs: Tensor, masks) -> Tensor:
        """relu(BN(weight inputs)), or mask * relu(weight inputs + shift)."""
        p, normal, active = self.stack.parameters, self.normal[i], self.active[i]
        if masks is not None:
            torch.baddbmm(p[f"shift{i}"], p[f"weight{i}"], inputs, out=active)
            return active.clamp_min_(0).mul_(masks[i + 1])
        torch.bmm(p[f"weight{i}"], inputs, out=normal)
        normal.sub_(normal.mean(2, keepdim=True))
        length = torch.linalg.vector_norm(normal, dim=2, keepdim=True)
        torch.rsqrt(length.square_().div_(self.batch_size).add_(EPS), out=self.rstd[i])
        normal.mul_(self.rstd[i])
        return torch.mul(normal, p[f"scale{i}"], out=active).add_(p[f"shift{i}"]).clamp_min_(0)

    def _hidden_backward(self, i: int, inputs: Tensor, masks) -> None:
        """From d loss / d output in `slope`: this layer's gradients, and d loss / d (weight inputs)
        in `product`.

        With z the normalised, d the gradient at the ReLU's input, means over the M rows:
            d loss / d (weight inputs) = scale rstd (d - mean(d) - z mean(d z))
        """
        g, d, product = self.gradients, self.slope, self.product
        if masks is not None:
            d.mul_(masks[i + 1])
        torch.ops.aten.threshold_backward.grad_input(d, self.active[i], 0, grad_input=product)
        torch.sum(product, 2, keepdim=True, out=g[f"shift{i}"])
        if masks is None:
            torch.mul(product, self.normal[i], out=d)
            torch.sum(d, 2, keepdim=True, out=g[f"scale{i}"])
            product.sub_(g[f"shift{i}"] / self.batch_size)
            product.sub_(torch.mul(self.normal[i], g[f"scale{i}"] / self.batch_size, out=d))
            product.mul_(self.rstd[i] * self.stack.parameters[f"scale{i}"])
        torch.bmm(product, inputs.transpose(1, 2), out=g[f"weight{i}"])


def networks_at_once(batch_size: int, hidden: int) -> int:
    """How many networks a stack should have at most:
    their activations are to stay in a core's cache."""
    return max(4, 2**17 // (batch_size * hidden))
