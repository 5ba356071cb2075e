"""CIFAR-10: the log-likelihood of a residual network against the number of replicas."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import collect, convert, data, metrics, plots, plug_in, predict
from ..experiments.fitting import device_at_hand, shifted
from ..experiments.store import save_figures
from ..metrics.significance import agrees, mean_and_error
from ..restore import preserved_rng
from .results import Estimate, Report, Table, Unit, read_table, required_folder

TITLE = "CIFAR-10: log-likelihood against the number of replicas (Teye et al. 2018, Table 2)"
WITHOUT_DATA = None
REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Settings:
    """The paper's ResNet32, batches and rates; what it leaves open is as in its authors' code.

    That is the steps of the rate, residual units that begin with batch norm, crops out of two
    pixels of padding, and images that each have mean 0 and variance 1. The code has batches of 128
    where the paper has 32. Quick trains one residual unit a stage (ResNet8) on a part of the images
    for fewer steps: its numbers are not the paper's, its course with T is what can be compared.
    Where a GPU is, it is used.
    """

    num_units: int = 5
    num_train: int | None = None
    num_validation: int = 0
    num_test: int | None = None
    steps: int = 80_000
    drops: tuple[int, ...] = (40_000, 60_000)
    train_batch_size: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 2e-4
    slope: float = 0.1
    batch_size: int = 32
    num_runs: int = 3
    seed: int = 0


QUICK = Settings(
    num_units=1, num_train=10_000, num_test=1_000, steps=3_000, drops=(1_500, 2_250), num_runs=2
)
FULL = Settings()


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    _folder(data_root)
    return [Unit(f"run-{run}", {"run": run}) for run in range(settings.num_runs)]


def _folder(data_root: str | None) -> Path:
    return required_folder("cifar", data_root, "cifar10", data.CIFAR)


def sources(settings: Settings, data_root: str) -> list[Path]:
    return [_folder(data_root)]


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """Train one network; the log-likelihood of the test images for every T, and of the plug-in."""
    seed = settings.seed + unit.arguments["run"]
    device = device_at_hand()
    split = data.cifar10(_folder(data_root), num_validation=settings.num_validation)
    train_part = data.Part(*(value[: settings.num_train].to(device) for value in split.train))
    x, y = (value[: settings.num_test] for value in split.test)
    with preserved_rng():
        torch.manual_seed(seed)
        network = ResNet(settings.num_units, settings.slope).to(device)
        losses = train(network, train_part, settings)
        model, size = convert(network), settings.batch_size
        batches = (augmented(train_part.x, size)[0] for _ in range(max(REPLICAS)))
        collect(model, batches, max(REPLICAS), progress=False)
        x = standardised(x.to(device))
        options = {"likelihood": "categorical", "num_samples": max(REPLICAS), "seed": seed}
        pred = predict(model, x, keep_samples=True, **options)
        plain = plug_in(network, x, likelihood="categorical").mean.cpu()
    probs = pred.samples.cpu().softmax(2)
    return {
        "losses": losses,
        "test_images": len(y),
        "train_images": len(train_part.x),
        "plug_in": metrics.categorical_pll(plain[None], y).item(),
        "plug_in_accuracy": metrics.accuracy(plain, y).item(),
        "accuracy": metrics.accuracy(probs.mean(0), y).item(),
        "pll": {str(t): pll(probs, y, t) for t in REPLICAS},
    }


def pll(probs: Tensor, y: Tensor, count: int) -> float:
    """Log-likelihood of `count` replicas, mean over the disjoint groups of so many; probs
    (T, N, K)."""
    return fmean(metrics.categorical_pll(group, y).item() for group in probs.split(count))


class ResNet(nn.Module):
    """The 6 n + 2 layers of He et al. 2016 for 32x32 images,
    batch norm and leaky ReLU before a convolution.

    Shapes: (N, 3, 32, 32) -> logits (N, 10).
    """

    def __init__(self, num_units: int, slope: float):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        units, inputs = [], 16
        for stage, width in enumerate((16, 32, 64)):
            for i in range(num_units):
                stride = 2 if stage and not i else 1
                units.append(ResidualUnit(inputs, width, stride, slope, shared=not units))
                inputs = width
        self.units = nn.Sequential(*units)
        self.norm, self.activation = nn.BatchNorm2d(inputs, 1e-3), nn.LeakyReLU(slope)
        self.head = nn.Linear(inputs, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.units(self.stem(x))))
        return self.head(x.mean((2, 3)))


class ResidualUnit(nn.Module):
    """Two convolutions, each behind batch norm and leaky ReLU, added to what came in.

    Where the width grows what came in is pooled and zeros are put beside its channels. If `shared`,
    it is what the first batch norm and leaky ReLU make of it that is added.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, slope: float, shared=False):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs, 1e-3), nn.BatchNorm2d(outputs, 1e-3)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.activation, self.stride, self.extra = nn.LeakyReLU(slope), stride, outputs - inputs
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm1(x))
        x = y if self.shared else x
        y = self.conv2(self.activation(self.norm2(self.conv1(y))))
        if self.stride > 1:
            x = functional.avg_pool2d(x, self.stride)
        return y + functional.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


def train(network: nn.Module, part: data.Part, settings: Settings) -> list[float]:
    """SGD with momentum; no decay of biases and of batch norm.
    The mean loss of each hundredth of the steps."""
    network.train()
    weights = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": settings.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, settings.learning_rate, settings.momentum)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, settings.drops, 0.1)
    losses, total = [], torch.zeros((), device=part.x.device)
    every = max(settings.steps // 100, 1)
    for step in range(1, settings.steps + 1):
        x, rows = augmented(part.x, settings.train_batch_size)
        loss = functional.cross_entropy(network(x), part.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if step % every == 0:
            losses.append(total.item() / every)
            total.zero_()
    network.eval()
    return losses


def augmented(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`size` different images, each cropped out of two pixels of zeros around it
    and turned at random.

    Args:
        x: (N, 3, H, W) in [0, 1].

    Returns:
        (size, 3, H, W) standardised, and the rows of x (size,).
    """
    rows = torch.randperm(len(x), device=x.device)[:size]
    return standardised(shifted(x[rows], 2)), rows


def standardised(x: Tensor) -> Tensor:
    """Each image with mean 0 and standard deviation 1;
    that of a flat one counts as 1 / sqrt(values)."""
    std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
    return (x - mean) / std.clamp_min(x[0].numel() ** -0.5)


def report(results: dict[str, dict], settings: Settings, folder: Path) -> Report:
    """Table 2 with our numbers beside the paper's, and each less the softmax
    of the same network."""
    runs, paper = list(results.values()), read_table("teye_table02_cifar10_pll_vs_T")
    ours = {t: mean_and_error([run["pll"][str(t)] for run in runs]) for t in REPLICAS}
    gains = {t: mean_and_error([run["pll"][str(t)] - run["plug_in"] for run in runs]) for t in ours}
    printed = {int(line["T"]): float(line["mcbn_pll"]) for line in paper}
    plain = mean_and_error([run["plug_in"] for run in runs])
    printed_plain = float(paper[0]["softmax_baseline_pll"])
    printed_gains = {t: round(value - printed_plain, 2) for t, value in printed.items()}
    rows = [
        [str(t), Estimate(*ours[t], 3), printed[t], Estimate(*gains[t], 3), printed_gains[t]]
        for t in REPLICAS
    ]
    rows.append(["softmax, moving average", Estimate(*plain, 3), printed_plain, None, None])
    title = f"PLL of MCBN by T, batch size {settings.batch_size}, over {len(runs)} networks"
    columns = ["T", "PLL", "PLL, paper", "PLL less softmax", "PLL less softmax, paper"]
    figures = save_figures(folder, {"cifar.png": draw(gains, printed_gains)})
    text = remarks(runs, settings)
    if settings == FULL:
        text += comparison(ours | {"softmax": plain}, printed | {"softmax": printed_plain})
    return Report([Table("cifar", title, columns, rows)], figures, text)


def draw(gains: dict[int, tuple[float, float]], printed: dict[int, float]):
    """How much T replicas gain over the softmax of the same network, here and in the paper."""
    curves = {"here": [gains[t][0] for t in REPLICAS], "paper": [printed[t] for t in REPLICAS]}
    ax = plots.against_batch_size(REPLICAS, curves, ylabel="PLL less that of the softmax (nats)")
    ax.axhline(0, color=plots.GREY, linewidth=0.8, zorder=0)
    ax.set_xlabel("replicas T")
    return ax.figure


def remarks(runs: list[dict], settings: Settings) -> list[str]:
    accuracy, plain = (
        100 * fmean(run[name] for run in runs) for name in ("accuracy", "plug_in_accuracy")
    )
    first, layers = runs[0], 6 * settings.num_units + 2
    text = (
        f"ResNet{layers}, {first['train_images']} training and {first['test_images']} test images: "
    )
    text += f"accuracy {accuracy:.1f} % with {REPLICAS[-1]} replicas, {plain:.1f} % without."
    if settings == FULL:
        return [text]
    return [
        text,
        "The network and its training are smaller than the paper's: the levels do not compare.",
    ]


def comparison(ours: dict, printed: dict) -> list[str]:
    """Where the two agree within two standard errors;
    those of the paper are not known and count as 0."""
    same = {key: agrees(*ours[key], printed[key]) for key in printed}
    return [
        f"Within two standard errors of the paper: T = {_listed(same, True)}; not: {_listed(same, False)}."
    ]


def _listed(same: dict, wanted: bool) -> str:
    return ", ".join(str(key) for key, value in same.items() if value is wanted) or "none"
