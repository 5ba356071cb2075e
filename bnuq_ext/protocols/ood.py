"""Classes that a network has never seen, and corrupted images of those that it has.

Trained on five classes, shown the other five: does the entropy of the prediction say so? With and
without drawn statistics, for one network, for dropout and for deep ensembles.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import convert, data, mc_dropout, plug_in, predict
from ..data.parts import check_classes, take
from ..experiments.fitting import collect_random, device_at_hand
from ..ops.checks import refuse
from ..restore import preserved_rng
from .ood_networks import NETWORKS, train
from .ood_report import STATISTICS, encode
from .ood_report import report as report
from .results import Unit

TITLE = "Unseen classes and corrupted images (Atanov et al. 2019, Table 1)"
WITHOUT_DATA = "digits"
# "mnist-all": all ten classes are known, as in the paper, and Fashion-MNIST is unseen
# (there notMNIST).
FOLDERS = {
    "mnist": ("mnist",),
    "mnist-all": ("mnist", "fashion-mnist"),
    "fashion-mnist": ("fashion-mnist",),
    "cifar10": ("cifar10",),
}
_ROWS = 250  # of a batch that is predicted


@dataclass(frozen=True)
class Settings:
    """The settings of the authors' code where it has any: Adam with rate 0.001 falling to 0,
    batches of 16, 50 epochs (LeNet-5) or 200, dropout 0.5 before the last layer, ensembles of 6,
    50 draws, statistics of 5 epochs.

    Of LeNet-5 the batch norm of the convolutions is stochastic and that of the layer of 500 is not,
    as there. Three runs are ours, and so are the shifts and flips of CIFAR-10 in training, and the
    corruptions: noise is added to pixels in [0, 1], blur is Gaussian with a std in 28ths of the
    width, rotations are in degrees. SBN draws each statistic from a normal and a log-normal; MCBN
    takes stored batches and is no part of that paper.

    Classes 0 to 4 are known and 5 to 9 are unseen, but for "mnist-all", which knows all ten as the
    paper's MNIST does and is shown Fashion-MNIST (there notMNIST). Quick: digits and MNIST alone,
    4,000 training images of MNIST (of the digits 400, as always), 20 and 10 epochs, ensembles of 3,
    20 draws, statistics of 64 batches, at most 800 test images of each kind.
    """

    cases: tuple[tuple[str, str, int], ...] = (
        ("digits", "lenet-5", 50),
        ("mnist", "lenet-5", 50),
        ("mnist-all", "lenet-5", 50),
        ("fashion-mnist", "lenet-5", 50),
        ("cifar10", "vgg-11", 200),
        ("cifar10", "resnet-18", 200),
    )
    num_known: int = 5
    num_train: int | None = None
    num_test: int | None = None
    batch_size: int = 16
    learning_rate: float = 0.001
    dropout: float = 0.5
    num_members: int = 6
    num_runs: int = 3
    num_samples: int = 50
    statistics_epochs: int = 5
    most_batches: int | None = None
    noise_stds: tuple[float, ...] = (0.25, 0.5)
    blur_stds: tuple[float, ...] = (1.0, 2.0)
    rotations: tuple[float, ...] = (30.0, 60.0)
    seed: int = 0


FULL = Settings()
QUICK = Settings(
    cases=(("digits", "lenet-5", 20), ("mnist", "lenet-5", 10)),
    num_train=4000,
    num_test=800,
    num_members=3,
    num_samples=20,
    most_batches=64,
)


class Images(NamedTuple):
    """Training images of the known classes, test images of them, and images of the others."""

    train: data.Part
    known: data.Part
    unknown: Tensor


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    """One trained network each: the members of every run's ensemble, and one with dropout."""
    units, cases = [], _cases(settings, data_root)
    for dataset in dict.fromkeys(case[0] for case in cases):
        read_images(dataset, settings, data_root)  # what is missing is told before the work begins
    for dataset, network, epochs in cases:
        for run in range(settings.num_runs):
            for member in range(settings.num_members + 1):
                dropout = member == settings.num_members
                arguments = {"dataset": dataset, "network": network, "epochs": epochs}
                arguments |= {"run": run, "member": member, "dropout": dropout}
                name = f"{dataset}-{network}-{run}-{'dropout' if dropout else member}"
                units.append(Unit(name, arguments))
    return units


def _cases(settings: Settings, data_root: str | None) -> list[tuple[str, str, int]]:
    """The cases whose data is there: the digits always, others where their folder is."""
    here = [
        case
        for case in settings.cases
        if case[0] == "digits"
        or (data_root and all((Path(data_root) / f).is_dir() for f in FOLDERS[case[0]]))
    ]
    wanted = sorted({f for case in settings.cases for f in FOLDERS.get(case[0], ())})
    given = any(case[0] != "digits" for case in here)
    if not here or (data_root is not None and wanted and not given):
        requirement = f"hold a folder {', '.join(wanted)} (MNIST's come from {data.idx.SOURCE})"
        refuse("ood", "data_root", requirement, data_root)
    return here


def sources(settings: Settings, data_root: str) -> list[Path]:
    names = {name for case in _cases(settings, data_root) for name in FOLDERS.get(case[0], ())}
    return [Path(data_root) / name for name in sorted(names)]


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """Trains a network; its probabilities under all three kinds of statistics."""
    arguments = unit.arguments
    images = read_images(arguments["dataset"], settings, data_root)
    inputs = shown_images(images, settings)
    device = device_at_hand()
    with preserved_rng():
        seed = settings.seed + 1000 * arguments["run"] + arguments["member"]
        torch.manual_seed(seed)
        model = make_model(arguments, images.train, settings, device)
        predicted = {
            name: {
                key: _probs(model, x.to(device), sampler, arguments["dropout"], settings, seed)
                for key, x in inputs.items()
            }
            for name, sampler in STATISTICS.items()
        }
    return {
        **arguments,
        "y": images.known.y.tolist(),
        "probs": {
            name: {key: encode(p) for key, p in parts.items()} for name, parts in predicted.items()
        },
    }


def read_images(dataset: str, settings: Settings, data_root: str | None) -> Images:
    """Images (N, C, H, W) in [0, 1]; the known classes are the first ones."""
    if dataset == "digits":
        train_part, *test_parts = _digits(settings)
    else:
        train_part, *test_parts = _from_files(dataset, settings, Path(data_root))
    train_part = take(train_part, slice(settings.num_train))
    inside, outside = (take(part, slice(settings.num_test)) for part in test_parts)
    shape = (-1, *_image_shape(train_part.x))
    return Images(
        data.Part(train_part.x.view(shape), train_part.y),
        data.Part(inside.x.view(shape), inside.y),
        outside.x.view(shape),
    )


def _digits(settings: Settings) -> tuple[data.Part, data.Part, data.Part]:
    """To train on, to test on, and of other classes."""
    known = settings.num_known
    counts = {"num_train": min(settings.num_train or 400, 400), "num_validation": known}
    inside = data.digits(**counts, seed=0, classes=range(known))
    few = 10 - known
    outside = data.digits(num_train=few, num_validation=few, classes=range(known, 10))
    return inside.train, inside.test, outside.test


def _from_files(
    dataset: str, settings: Settings, root: Path
) -> tuple[data.Part, data.Part, data.Part]:
    """As `_digits`; raises where a folder holds too few images."""
    folders = [root / folder for folder in FOLDERS[dataset]]
    read = data.cifar10 if dataset == "cifar10" else data.mnist
    splits = [read(folder, num_validation=1) for folder in folders]
    for folder, split in zip(folders, splits, strict=True):
        check_classes("ood", split, 10, str(folder))
    (train_part, _, test), *others = splits
    known = 10 if others else settings.num_known
    parts = {
        "training images of known classes": take(train_part, train_part.y < known),
        "test images of known classes": take(test, test.y < known),
        "test images of unseen classes": others[0].test if others else take(test, test.y >= known),
    }
    for (name, part), least in zip(parts.items(), (settings.batch_size, 1, 1), strict=True):
        if len(part.y) < least:
            refuse("ood", str(folders[0]), f"hold at least {least} {name}", len(part.y))
    return tuple(parts.values())


def _image_shape(x: Tensor) -> tuple[int, ...]:
    """(C, H, W); flat images are square and grey."""
    if x.dim() == 4:
        return tuple(x.shape[1:])
    side = math.isqrt(x.shape[1])
    if side**2 != x.shape[1]:
        refuse("ood", "data_root", "hold square images", f"some of {x.shape[1]} pixels")
    return 1, side, side


def shown_images(images: Images, settings: Settings) -> dict[str, Tensor]:
    """Known and unknown images, and corruptions of the known ones, by "<kind> <level>"."""
    x = images.known.x
    inputs = {"known": x, "unknown": images.unknown}
    for std in settings.noise_stds:
        inputs[f"noise {std:g}"] = data.add_noise(x, std, seed=settings.seed)
    for std in settings.blur_stds:
        inputs[f"blur {std:g}"] = blur(x, std * x.shape[3] / 28)
    for degrees in settings.rotations:
        inputs[f"rotation {degrees:g}"] = rotate(x, degrees)
    return inputs


def blur(x: Tensor, std: float) -> Tensor:
    """Images (N, C, H, W) smoothed by a Gaussian of `std` pixels, cut off at 3 stds;
    edges are repeated."""
    radius = max(1, round(3 * std))
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / std).square())
    weights = (weights / weights.sum()).to(x)
    n, channels, height, width = x.shape
    x = functional.pad(x.view(n * channels, 1, height, width), [radius] * 4, mode="replicate")
    x = functional.conv2d(
        functional.conv2d(x, weights.view(1, 1, 1, -1)), weights.view(1, 1, -1, 1)
    )
    return x.view(n, channels, height, width)


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Square images (N, C, H, H) turned counterclockwise, bilinear;
    zeros come in at the corners."""
    angle = torch.deg2rad(torch.tensor(degrees, dtype=x.dtype))
    turn = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0])
    grid = functional.affine_grid(turn.view(1, 2, 3).expand(len(x), 2, 3), x.shape, False)
    return functional.grid_sample(x, grid, align_corners=False)


def make_model(
    arguments: dict, part: data.Part, settings: Settings, device: torch.device
) -> nn.Module:
    """A trained network, converted, with its bank."""
    channels, size, _ = part.x.shape[1:]
    dropout = settings.dropout if arguments["dropout"] else 0.0
    known = 10 if arguments["dataset"] == "mnist-all" else settings.num_known
    network = NETWORKS[arguments["network"]](channels, size, known, dropout).to(device)
    x, y = part.x.to(device), part.y.to(device)
    train(
        network,
        x,
        y,
        epochs=arguments["epochs"],
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        augment=arguments["dataset"] == "cifar10",
    )
    model = convert(network, filter_fn=lambda name, module: isinstance(module, nn.BatchNorm2d))
    batches = settings.statistics_epochs * (len(x) // settings.batch_size)
    batches = min(batches, settings.most_batches or batches)
    collect_random(model, x, batches, settings.batch_size)
    return model


def _probs(
    model: nn.Module, x: Tensor, sampler: str | None, dropout: bool, settings: Settings, seed: int
) -> Tensor:
    """(N, K) mean probabilities under one kind of statistics."""
    batches = list(x.split(_ROWS))
    if sampler is None and not dropout:
        return plug_in(model, batches, likelihood="categorical").mean
    options = {"likelihood": "categorical", "num_samples": settings.num_samples, "seed": seed}
    return (mc_dropout if dropout else predict)(model, batches, sampler=sampler, **options).mean
