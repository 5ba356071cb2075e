"""The batch size that makes the uncertainty vanish: J. Mukhoti et al.'s figure and table,
and the choice by the ELBO."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .. import BatchSizeFit, convert, fit_batch_size, implied_prior, metrics, plug_in, predict
from ..data import Part, digits, mnist
from ..data.parts import Split, check_classes, hold_out, take
from ..experiments.fitting import collect_random, device_at_hand, train_epoch
from ..ops.checks import refuse
from ..restore import preserved_rng
from .batch_size_report import report as report
from .results import Unit

TITLE = "Epistemic uncertainty against the batch size (Mukhoti et al., Figure 1 and Table 1)"
WITHOUT_DATA = "digits"
CLASSES = 10  # of Fashion-MNIST


@dataclass(frozen=True)
class Settings:
    """Fashion-MNIST against MNIST. For each batch size a network is trained with it
    and predicts with it.

    As in the paper: VGG-16, 100 epochs of SGD with momentum 0.9, the rate divided by 10 after
    epochs 40 and 60, 20 replicas. It does not give the rate, nor weight decay; 0.1 and 5e-4 are
    usual ones. The last `num_validation` training images are kept for validation, which only the
    choice of the batch size uses. Full needs a GPU.

    Quick: three small convolutions instead of VGG-16, 20,000 training images, 12 epochs, 2,000 test
    images of each kind. Without a data root: digits 0 to 4 against 5 to 9,
    and batch sizes up to 256.

    The choice of the batch size takes the network trained with `fit_trained_with` and gives it the
    statistics of batches of each of `fit_batch_sizes`, and with `fit_whole` of all training images
    at once (which for VGG-16 would need their activations in memory together). Its training
    likelihood is estimated from `fit_rows`. The mutual information is also taken with the
    statistics of the first 1/16 and 1/4 of the training images alone, `fit_shares`,
    each up to the whole of them.
    """

    network: str = "vgg16"
    num_train: int | None = None
    num_validation: int = 5000
    num_test: int | None = None
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    epochs: int = 100
    drops: tuple[int, ...] = (40, 60)
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    num_samples: int = 20
    num_seeds: int = 1
    fit_trained_with: int = 32
    fit_batch_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    fit_rows: int = 2000
    fit_whole: bool = False
    fit_shares: tuple[int, ...] = (16, 4)
    digits_batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256)


QUICK = Settings(
    network="small", num_train=20_000, num_validation=2000, num_test=2000, epochs=12, drops=(5, 8),
    num_seeds=2, fit_whole=True,
)  # fmt: skip
FULL = Settings()


class Images(NamedTuple):
    """Images (N, 1, H, W) scaled to mean 0 and standard deviation 1 of the training part."""

    train: Part
    validation: Part
    test: Part
    foreign: Tensor
    num_classes: int


def batch_sizes(settings: Settings, data_root: str | None) -> tuple[int, ...]:
    return settings.batch_sizes if data_root is not None else settings.digits_batch_sizes


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    count = len(load(settings, data_root, 0).train.x)
    sizes = batch_sizes(settings, data_root)
    if max(sizes) >= count:
        refuse("reproduce", "batch_sizes", f"be less than the {count} training images", max(sizes))
    seeds = range(settings.num_seeds)
    units = [Unit(f"fit-{s}", {"seed": s, "batch_size": None}) for s in seeds]
    return units + [
        Unit(f"M{M}-{s}", {"seed": s, "batch_size": M}) for s in seeds for M in reversed(sizes)
    ]


def load(settings: Settings, data_root: str | None, seed: int) -> Images:
    """Fashion-MNIST against MNIST, or digits 0 to 4 against 5 to 9."""
    if data_root is None:
        if settings.network == "vgg16":  # it halves images five times
            requirement = "hold fashion-mnist and mnist, since digits are too small for VGG-16"
            refuse("reproduce", "data_root", requirement, None)
        known = digits(num_train=600, num_validation=100, seed=seed, classes=range(5))
        foreign = torch.cat([p.x for p in digits(classes=range(5, 10))])
        return _scaled(known, foreign, 5)
    root = Path(data_root)
    known = _fashion(root / "fashion-mnist", settings)
    check_classes("reproduce", known, CLASSES)
    foreign = mnist(root / "mnist", num_validation=1).test.x
    some = slice(settings.num_train), slice(None), slice(settings.num_test)
    known = [take(part, rows) for part, rows in zip(known, some, strict=True)]
    return _scaled(known, foreign[some[2]], CLASSES)


def _fashion(folder: Path, settings: Settings) -> Split:
    found = mnist(folder, num_validation=0)
    least, count = settings.num_validation + max(settings.batch_sizes) + 1, len(found.train.x)
    if count < least:
        refuse("reproduce", str(folder), f"hold {least} training images or more", count)
    return hold_out("reproduce", found.train, settings.num_validation, found.test)


def _scaled(known, foreign: Tensor, num_classes: int) -> Images:
    mean, std = known[0].x.mean(), known[0].x.std()
    side = round(foreign.shape[1] ** 0.5)

    def images(x: Tensor) -> Tensor:
        return ((x - mean) / std).view(-1, 1, side, side)

    return Images(*(Part(images(p.x), p.y) for p in known), images(foreign), num_classes)


VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def make_network(name: str, num_classes: int) -> nn.Sequential:
    """ "small": three convolutions of stride 2. "vgg16": with batch norm,
    for images padded to 32 x 32."""
    if name == "small":
        blocks = [(1, 16, 3, 2, 1), (16, 32, 3, 2, 1), (32, 64, 3, 2, 1)]
        layers = [m for block in blocks for m in _block(*block)]
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)
        )
    if name != "vgg16":
        refuse("reproduce", "network", "be small or vgg16", repr(name))
    layers, channels = [nn.ZeroPad2d(2)], 1
    for width in VGG16:
        if width == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += _block(channels, width, 3, 1, 1)
            channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, num_classes))


def _block(*convolution) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(*convolution, bias=False),
        nn.BatchNorm2d(convolution[1]),
        nn.ReLU(inplace=True),
    )


def sources(settings: Settings, data_root: str) -> list[Path]:
    return [Path(data_root) / "fashion-mnist", Path(data_root) / "mnist"]


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """A network trained with M and its scores, or the curves of the choice of M."""
    seed, M = unit.arguments["seed"], unit.arguments["batch_size"]
    device = device_at_hand()
    images = load(settings, data_root, seed)
    with preserved_rng():
        torch.manual_seed(seed)
        network = make_network(settings.network, images.num_classes).to(device)
        train(network, images.train, M or settings.fit_trained_with, settings)
        if M is None:
            return choose(convert(network), images, settings, seed)
        return scores(convert(network), images, M, settings, seed)


def train(network: nn.Module, part: Part, M: int, settings: Settings) -> None:
    """SGD with momentum 0.9 in steps."""
    network.train()
    device = next(network.parameters()).device
    x, y = part.x.to(device), part.y.to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), settings.learning_rate, 0.9, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, settings.drops)
    for _ in range(settings.epochs):
        train_epoch(network, optimizer, functional.cross_entropy, x, y, M)
        schedule.step()
    network.eval()


def scores(model: nn.Module, images: Images, M: int, settings: Settings, seed: int) -> dict:
    """What 20 replicas with statistics of batches of M say of known and of foreign images."""
    torch.manual_seed(seed)
    collect_random(model, images.train.x, settings.num_samples, M)
    options = {"likelihood": "categorical", "num_samples": settings.num_samples, "seed": seed}
    known = predict(model, _parts(images.test.x), **options)
    foreign = predict(model, _parts(images.foreign), **options)
    plain = plug_in(model, _parts(images.test.x), likelihood="categorical").mean
    y, informations = images.test.y, (known.mutual_information, foreign.mutual_information)
    return {
        "plug_in_accuracy": metrics.accuracy(plain, y).item(),
        "plug_in_nll": metrics.nll(plain, y).item(),
        "accuracy": metrics.accuracy(known.mean, y).item(),
        "nll": metrics.nll(known.mean, y).item(),
        "information_in": informations[0].mean().item(),
        "information_out": informations[1].mean().item(),
        "auroc_information": metrics.auroc(*informations).item(),
        "auroc_entropy": metrics.auroc(known.entropy, foreign.entropy).item(),
    }


def _parts(x: Tensor) -> list[Tensor]:
    return list(x.split(500))


def choose(model: nn.Module, images: Images, settings: Settings, seed: int) -> dict:
    """Curves of `fit_batch_size`, the mutual information of foreign images too;
    infinite values are None."""
    train, N = images.train, len(images.train.x)
    candidates = [M for M in settings.fit_batch_sizes if M < N] + [N] * settings.fit_whole
    options = {
        "likelihood": "categorical",
        "prior": implied_prior(settings.weight_decay / 2, N),
        "num_samples": settings.num_samples,
        "seed": seed,
        "progress": False,
    }
    data, rows = TensorDataset(*train), min(settings.fit_rows, N)
    known = TensorDataset(*images.validation)
    fit = fit_batch_size(model, data, candidates, validation=known, num_rows=rows, **options)
    labels = torch.zeros(len(images.foreign), dtype=torch.int64)  # of no meaning, and not used
    foreign = TensorDataset(images.foreign, labels)
    other = fit_batch_size(model, data, candidates, validation=foreign, num_rows=1, **options)
    plain = plug_in(model, _parts(images.validation.x), likelihood="categorical").mean
    return {
        "batch_sizes": fit.batch_sizes.tolist(),
        "best_by_elbo": fit.best_by_elbo,
        "best_by_nll": fit.best_by_nll,
        "plug_in_nll": metrics.nll(plain, images.validation.y).item(),
        "train_rows": N,
        **_curves(fit, other),
        "shares": [
            informations(model, train, N // share, known, settings, options)
            for share in settings.fit_shares
        ],
    }


def _curves(known: BatchSizeFit, foreign: BatchSizeFit) -> dict[str, list[float | None]]:
    curves = {name: getattr(known, name) for name in ("log_likelihood", "kl", "elbo", "nll")}
    curves["information_in"] = known.mutual_information
    curves["information_out"] = foreign.mutual_information
    return {n: [v if isfinite(v) else None for v in c.tolist()] for n, c in curves.items()}


def informations(model, train: Part, N: int, known, settings: Settings, options: dict) -> dict:
    """Mutual information of known images by batch size, where there are N training images."""
    data = TensorDataset(train.x[:N], train.y[:N])
    candidates = [M for M in settings.fit_batch_sizes if M < N] + [N]
    fit = fit_batch_size(model, data, candidates, validation=known, num_rows=1, **options)
    return {
        "train_rows": N,
        "batch_sizes": candidates,
        "information_in": fit.mutual_information.tolist(),
    }
