"""LeNet-5, VGG-11 and ResNet-18 with batch norm, for small images, and their training."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..experiments.fitting import shifted


class LeNet5(nn.Sequential):
    """Two convolutions (20, 50) and a layer of 500, batch norm before each ReLU;
    dropout behind the last.

    Kernels of 5 as for 28 x 28 pixels; of 3 with padding where the images are smaller than 16.
    """

    def __init__(self, channels: int, size: int, num_classes: int, dropout: float):
        kernel, padding = (5, 0) if size >= 16 else (3, 1)
        left = size
        for _ in range(2):
            left = (left + 2 * padding - kernel + 1) // 2
        convolution = {"kernel_size": kernel, "padding": padding}
        super().__init__(
            nn.Conv2d(channels, 20, **convolution), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, **convolution), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(50 * left * left, 500), nn.BatchNorm1d(500), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(500, num_classes),
        )  # fmt: skip


class VGG11(nn.Sequential):
    """Eight convolutions of 3 x 3, each with batch norm and ReLU, and five poolings;
    for 32 x 32 pixels."""

    WIDTHS = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)

    def __init__(self, channels: int, size: int, num_classes: int, dropout: float):
        layers = []
        for width in self.WIDTHS:
            if width is None:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        left = size // 2 ** self.WIDTHS.count(None)
        head = nn.Dropout(dropout), nn.Linear(channels * left * left, num_classes)
        super().__init__(*layers, nn.Flatten(), *head)


class Block(nn.Module):
    """Two convolutions of 3 x 3 and the way past them,
    which is a convolution of 1 x 1 where sizes change."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.past = nn.Identity()
        if stride != 1 or channels != width:
            shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.past = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(h)) + self.past(x)).relu()


class ResNet18(nn.Sequential):
    """A convolution of 3 x 3, eight blocks in four widths, the mean over the pixels."""

    def __init__(self, channels: int, size: int, num_classes: int, dropout: float):
        stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        blocks, channels = [], 64
        for width in (64, 128, 256, 512):
            for stride in (1 if width == 64 else 2, 1):
                blocks.append(Block(channels, width, stride))
                channels = width
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(*stem, *blocks, *pool, nn.Dropout(dropout), nn.Linear(512, num_classes))


NETWORKS = {"lenet-5": LeNet5, "vgg-11": VGG11, "resnet-18": ResNet18}


def train(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    augment: bool,
) -> None:
    """Adam on the cross-entropy, with a rate that falls linearly to 0;
    rows that fill no batch wait.

    Args:
        network: changed in place, and in eval at the end.
        x, y: (N, C, H, W) images and (N,) labels, on the network's device.
        augment: whether every batch is shifted by up to 4 pixels and flipped at random.
    """
    steps = epochs * (len(x) // batch_size)
    optimizer = torch.optim.Adam(network.parameters(), learning_rate, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(x))[: len(x) // batch_size * batch_size].to(x.device)
        for rows in order.split(batch_size):
            inputs = shifted(x[rows], 4).contiguous() if augment else x[rows]
            optimizer.zero_grad()
            functional.cross_entropy(network(inputs), y[rows]).backward()
            optimizer.step()
            scheduler.step()
    network.eval()
