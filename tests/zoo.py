"""Small networks with batch norm in every place where it turns up, and how to compare them."""

import warnings
from unittest import mock

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (self.bn(self.conv(x)) + x).relu()
        return self.head(x.mean((2, 3)))


class Wrapped(nn.Module):
    """A model in a forward of its own, and so no plain chain."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


class Shared(nn.Module):
    """One batch norm under two names, and called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 6)
        self.bn1 = nn.BatchNorm1d(6)
        self.bn2 = self.bn1

    def forward(self, x):
        return self.bn2(self.second(self.bn1(self.first(x)).relu()))


def mlp(**options):
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8, **options),
        nn.ReLU(),
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8, **options), nn.ReLU())),
        nn.Linear(8, 5),
    )


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
    )


def data_parallel(model):
    """As on a machine without a GPU, for with one the wrapper takes the model there."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        return nn.DataParallel(model)


ROWS, IMAGES = (6, 3), (4, 3, 5, 6)
ZOO = {
    "mlp": (mlp, ROWS),
    "affine=False": (lambda: mlp(affine=False), ROWS),
    "track_running_stats=False": (lambda: mlp(track_running_stats=False), ROWS),
    "momentum=None": (lambda: mlp(momentum=None), ROWS),
    "residual": (Residual, IMAGES),
    "depthwise": (depthwise, IMAGES),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (4, 3, 7)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), (2, 3, 4, 3, 3)),
    "shared": (Shared, ROWS),
    "root": (lambda: nn.BatchNorm2d(3), IMAGES),
    "graph": (lambda: torch.fx.symbolic_trace(Residual()), IMAGES),
    "data parallel": (lambda: data_parallel(Residual()), IMAGES),
    "sync": (lambda: nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)), ROWS),
}


def network(name):
    """(model, x): parameters and running statistics are not the initial ones; in train()."""
    torch.manual_seed(0)
    make, shape = ZOO[name]
    model = make()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model, torch.randn(shape)


def step(model, x):
    """Output, gradients and buffers of one forward and backward."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def classes(model):
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
