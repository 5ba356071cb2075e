"""How the networks of experiments and protocols are made and fitted: chains, epochs,
shifted images, banks."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .. import Bank, collect


def device_at_hand() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_norm_chain(
    inputs: int, widths: Sequence[int], outputs: int, *, bias: bool = False, eps: float = 1e-5
) -> nn.Sequential:
    """(Linear, BatchNorm1d, ReLU) for each width, and a Linear; `bias` is that of the former."""
    layers = []
    for width in widths:
        layers += [nn.Linear(inputs, width, bias), nn.BatchNorm1d(width, eps), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    batch_size: int,
) -> None:
    """A step for each batch of the rows in a new order; the last rows, which fill no batch,
    are dropped."""
    for rows in torch.randperm(len(x)).split(batch_size):
        if len(rows) == batch_size:
            optimizer.zero_grad()
            loss(network(x[rows]), y[rows]).backward()
            optimizer.step()


def shifted(x: Tensor, most: int) -> Tensor:
    """Images (N, C, H, W) with up to `most` pixels cut off at one side and zeros at the other,
    half of them mirrored."""
    n, _, height, width = x.shape
    down, right = torch.randint(2 * most + 1, (2, n, 1), device=x.device)
    rows = torch.arange(height, device=x.device) + down
    columns = torch.arange(width, device=x.device) + right
    mirrored = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = functional.pad(x, [most] * 4)
    images = torch.arange(n, device=x.device).view(n, 1, 1)
    return padded[images, :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def collect_random(model: nn.Module, x: Tensor, num_batches: int, batch_size: int) -> Bank:
    """`collect` of random batches of x; one above a tenth of x is what the settings say."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "collect: the batches have")
        dataset = TensorDataset(x)
        return collect(model, dataset, num_batches, batch_size=batch_size, progress=False)
