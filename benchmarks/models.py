"""The networks that are timed: an MLP and two ResNets, written from He et al.
(arXiv 1512.03385)."""

import torch
from torch import Tensor, nn

from bnuq_ext.experiments.fitting import batch_norm_chain


def mlp(in_features: int = 784, width: int = 256, depth: int = 4, num_classes: int = 10):
    """`depth` times linear, batch norm and ReLU of `width` channels, then a linear layer."""
    return batch_norm_chain(in_features, [width] * depth, num_classes, bias=True)


def convolution(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=False)


def shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution and a batch norm where shapes differ."""
    if stride == 1 and fan_in == fan_out:
        return nn.Identity()
    return nn.Sequential(convolution(fan_in, fan_out, 1, stride), nn.BatchNorm2d(fan_out))


class Basic(nn.Module):
    """Two 3x3 convolutions and a residual: relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))."""

    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(fan_in, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = shortcut(fan_in, width, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions and a residual;
    the output has 4 `width` channels."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int):
        super().__init__()
        fan_out = self.expansion * width
        self.conv1, self.bn1 = convolution(fan_in, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, fan_out, 1), nn.BatchNorm2d(fan_out)
        self.shortcut = shortcut(fan_in, fan_out, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        return self.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


def imagenet_stem(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    )


def cifar_stem(width: int) -> nn.Sequential:
    """The stem for 32x32 images: one 3x3 convolution, no pooling."""
    return nn.Sequential(convolution(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())


class ResNet(nn.Module):
    """Residual network of four stages; each but the first halves the image and doubles the width.

    Args:
        block: `Basic` or `Bottleneck`.
        depths: blocks of each stage.
        stem: `cifar_stem` or `imagenet_stem`.
        width: channels of the first stage.

    Shapes: (N, 3, H, W) -> (N, num_classes).
    """

    def __init__(self, block, depths, stem, num_classes: int, width: int = 64):
        super().__init__()
        self.stem = stem(width)
        fan_in, blocks = width, []
        for stage, depth in enumerate(depths):
            for i in range(depth):
                channels, stride = width << stage, 2 if stage and i == 0 else 1
                blocks.append(block(fan_in, channels, stride))
                fan_in = channels * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(fan_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet18(num_classes: int = 10, width: int = 64) -> ResNet:
    """ResNet-18 with the CIFAR stem, for 32x32 images."""
    return ResNet(Basic, (2, 2, 2, 2), cifar_stem, num_classes, width)


def resnet50(num_classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-50 for 224x224 images, the stride in the 3x3 convolutions."""
    return ResNet(Bottleneck, (3, 4, 6, 3), imagenet_stem, num_classes, width)


def randomise_batch_norm(model: nn.Module) -> nn.Module:
    """Give every batch norm weights, biases and running statistics that are not 1 and 0."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.running_var):
                tensor.data.copy_(0.75 + 0.5 * torch.rand(tensor.shape, generator=generator))
            for tensor in (module.bias, module.running_mean):
                tensor.data.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval()
