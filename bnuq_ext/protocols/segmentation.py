"""Street scenes: uncertainty of every pixel from the statistics
of the first batch-norm layers alone."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import Prediction, convert, data, metrics, plots, plug_in, predict
from ..experiments.fitting import collect_random, device_at_hand
from ..experiments.store import save_figures
from ..metrics.significance import agrees, mean_and_error
from ..restore import preserved_rng
from .results import Estimate, Report, Table, Unit, required_folder

TITLE = "Segmentation of CamVid with partial MCBN (Teye et al. 2018, section 4.4 and figure 2)"
WITHOUT_DATA = None
CLASSES = "sky building pole road pavement tree sign fence car pedestrian bicyclist".split()
UNLABELLED = len(CLASSES)
ROWS = {  # how many batch-norm layers are stochastic
    "plug-in": 0,
    "plug-in, temperature": 0,
    "MCBN, first two blocks": 2,
    "MCBN, all blocks": math.inf,
}
SHOWN = "MCBN, first two blocks"
COLUMNS = {
    "accuracy": ("pixel accuracy (%)", 100, 1),
    "mean_iou": ("mean IoU (%)", 100, 1),
    "nll": ("NLL (nats)", 1, 3),
    "ece": ("ECE (%)", 100, 1),
    "border_ratio": ("variance, borders over elsewhere", 1, 1),
    "auroc": ("AUROC of variance for errors", 1, 3),
}


@dataclass(frozen=True)
class Settings:
    """The paper takes the published Bayesian SegNet,
    batches of 10 frames of 360x480 and 20 inferences.

    The network here is a small SegNet (pooling indices go to the decoder), trained from scratch by
    AdamW on what frames the folder holds, each turned left to right with probability 1/2. `shrink`
    takes the mean of that many pixels a side of the half-resolution frames, and every so-manyth
    label. Quick shrinks to 90x120 and has fewer epochs and channels.
    """

    shrink: int = 1
    channels: tuple[int, ...] = (32, 48, 64, 96)
    epochs: int = 200
    train_batch_size: int = 10
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    batch_size: int = 10
    num_samples: int = 20
    num_validation: int = 10
    border: int = 2
    num_runs: int = 4
    num_shown: int = 2
    seed: int = 0


QUICK = Settings(shrink=2, channels=(24, 32, 48, 64), epochs=80)
FULL = Settings()


def make_units(settings: Settings, data_root: str | None) -> list[Unit]:
    _folder(data_root)
    return [Unit(f"run-{run}", {"run": run}) for run in range(settings.num_runs)]


def _folder(data_root: str | None) -> Path:
    return required_folder("segmentation", data_root, "camvid", data.CAMVID)


def load(settings: Settings, data_root: str | None) -> data.Split:
    """Frames as the network sees them: shrunk, with mean 0 and standard deviation 1
    in each colour."""
    split = data.camvid(_folder(data_root), num_validation=settings.num_validation)
    size = settings.shrink
    parts = [(functional.avg_pool2d(x, size), y[:, ::size, ::size]) for x, y in split]
    parts = [data.Part(x, y[:, : x.shape[2], : x.shape[3]]) for x, y in parts]
    std, mean = torch.std_mean(parts[0].x, (0, 2, 3), keepdim=True)
    return data.Split(*(data.Part((x - mean) / std, y) for x, y in parts))


def sources(settings: Settings, data_root: str) -> list[Path]:
    return [_folder(data_root)]


def compute(unit: Unit, settings: Settings, data_root: str | None) -> dict:
    """Train one network; scores of each way to predict the test frames,
    and maps of some of them."""
    seed = settings.seed + unit.arguments["run"]
    device = device_at_hand()
    split = load(settings, data_root)
    with preserved_rng():
        torch.manual_seed(seed)
        network = SegNet(settings.channels).to(device)
        losses = train(network, split.train, settings, device)
        result = {"losses": losses, "scores": {}}
        for row, blocks in ROWS.items():
            model = network
            if "temperature" in row:
                model = Tempered(network, temperature(network, split.validation, device))
            pred = predictor(model, split.train, blocks, settings, seed)
            result["scores"][row] = evaluate(pred, split.test, settings, device)
            if row == SHOWN and unit.arguments["run"] == 0:
                result["maps"] = maps(pred, split.test, settings, device)
    return result


class SegNet(nn.Module):
    """An encoder that keeps where each maximum was, and a decoder that puts it back there.

    Shapes: (N, 3, H, W) -> logits (N, 11, H, W).
    """

    def __init__(self, channels: tuple[int, ...]):
        super().__init__()
        inputs = (3, *channels)
        self.encoder = nn.ModuleList(_block(i, o) for i, o in zip(inputs, channels, strict=False))
        outputs = (channels[0], *channels[:-1])
        pairs = reversed(list(zip(channels, outputs, strict=True)))
        self.decoder = nn.ModuleList(_block(i, o) for i, o in pairs)
        self.head = nn.Conv2d(channels[0], len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for block in self.encoder:
            x = block(x)
            size = x.shape[2:]
            x, indices = functional.max_pool2d(x, 2, return_indices=True)
            places.append((indices, size))
        for block, (indices, size) in zip(self.decoder, reversed(places), strict=True):
            x = block(functional.max_unpool2d(x, indices, 2, output_size=size))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def train(network: nn.Module, part: data.Part, settings: Settings, device) -> list[float]:
    """AdamW with a rate that falls to 0 by a cosine; the mean loss of each epoch."""
    network.train()
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    losses = []
    for _ in range(settings.epochs):
        total, batches = 0.0, torch.randperm(len(part.x)).split(settings.train_batch_size)
        for rows in batches:
            x, y = _turned(part.x[rows], part.y[rows])
            logits = network(x.to(device))
            loss = functional.cross_entropy(logits, y.to(device), ignore_index=UNLABELLED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        losses.append(total / len(batches))
    network.eval()
    return losses


def _turned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    turn = torch.rand(len(x)) < 0.5
    x = torch.where(turn[:, None, None, None], x.flip(3), x)
    return x, torch.where(turn[:, None, None], y.flip(2), y)


class Tempered(nn.Module):
    """A network whose logits are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float):
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) / self.temperature


def temperature(network: nn.Module, part: data.Part, device) -> float:
    """The temperature with the least NLL of the labelled pixels of these frames."""
    with torch.no_grad():
        logits = torch.cat([network(x.to(device)).cpu() for x in part.x.split(5)])
    known = part.y != UNLABELLED
    return metrics.fit_temperature(logits.movedim(1, -1)[known], part.y[known])


def predictor(network: nn.Module, part: data.Part, blocks: float, settings: Settings, seed: int):
    """A function from frames to their Prediction, with the first `blocks` layers stochastic."""
    if blocks == 0:
        return lambda x: plug_in(network, x, likelihood="categorical")
    names = [name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)]
    first = names[: int(min(blocks, len(names)))]
    model = convert(network, filter_fn=lambda name, module: name in first)
    collect_random(model, part.x, settings.num_samples, settings.batch_size)
    options = {"likelihood": "categorical", "num_samples": settings.num_samples, "seed": seed}
    return lambda x: predict(model, x, **options)


def evaluate(pred, part: data.Part, settings: Settings, device) -> dict:
    """Scores over all labelled pixels of all frames."""
    probs, labels, variances, borders = [], [], [], []
    for x, y in zip(part.x.split(5), part.y.split(5), strict=True):
        found = pred(x.to(device))
        known = y != UNLABELLED
        probs.append(found.mean.cpu().movedim(1, -1)[known])
        variances.append(uncertainty(found).cpu()[known])
        labels.append(y[known])
        borders.append(near_border(y, settings.border)[known])
    probs, y, variance, border = map(torch.cat, (probs, labels, variances, borders))
    guess = probs.argmax(1)
    wrong, pairs = guess != y, y * len(CLASSES) + guess
    counts = pairs.bincount(minlength=len(CLASSES) ** 2).view(len(CLASSES), -1)
    scores = {
        "accuracy": 1 - wrong.double().mean().item(),
        "mean_iou": mean_iou(counts),
        "nll": metrics.nll(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
        "border_ratio": None,
        "auroc": None,
    }
    if variance.any():
        at, off = variance[border].mean(), variance[~border].mean()
        scores["border_ratio"] = (at / off).item()
        scores["auroc"] = metrics.auroc(variance[~wrong], variance[wrong]).item()
    return scores


def uncertainty(pred: Prediction) -> Tensor:
    """(N, H, W) variance of the class probabilities over the replicas, mean over the classes."""
    return pred.variance.mean(1)


def near_border(y: Tensor, distance: int) -> Tensor:
    """(N, H, W) whether a pixel of another label lies within `distance` rows and columns."""
    size = 2 * distance + 1
    y = y[:, None].float()
    highest = functional.max_pool2d(y, size, 1, distance)
    lowest = -functional.max_pool2d(-y, size, 1, distance)
    return (highest != lowest).squeeze(1)


def mean_iou(counts: Tensor) -> float:
    """Mean over the classes that occur of intersection over union; counts
    (K true, K predicted) pixels."""
    hits, union = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
    present = counts.sum(1) > 0
    return (hits[present] / union[present]).double().mean().item()


def maps(pred, part: data.Part, settings: Settings, device) -> list[dict]:
    """What the figures show of evenly spaced test frames, in few enough digits for JSON."""
    chosen = torch.linspace(0, len(part.x) - 1, settings.num_shown + 2).long()[1:-1]
    found = pred(part.x[chosen].to(device))
    x = part.x[chosen]
    low, high = x.amin((1, 2, 3), True), x.amax((1, 2, 3), True)
    pixels = (255 * (x - low) / (high - low)).round().byte().movedim(1, -1)
    return [
        {
            "frame": int(chosen[i]),
            "image": pixels[i].tolist(),
            "truth": part.y[chosen[i]].tolist(),
            "prediction": found.mean[i].argmax(0).tolist(),
            "uncertainty": [[round(v, 6) for v in line] for line in uncertainty(found)[i].tolist()],
        }
        for i in range(len(chosen))
    ]


def report(results: dict[str, dict], settings: Settings, folder: Path) -> Report:
    """A row for each way to predict, and maps of some frames of the first run."""
    runs = list(results.values())
    rows = [[row, *(_cell(runs, row, name) for name in COLUMNS)] for row in ROWS]
    title = f"Test frames, labelled pixels: mean ± standard error over {len(runs)} networks"
    table = Table("segmentation", title, ["", *(c[0] for c in COLUMNS.values())], rows)
    drawn = {
        f"segmentation-frame-{entry['frame']}.png": draw(entry)
        for entry in results["run-0"]["maps"]
    }
    figures = save_figures(folder, drawn, bbox_inches="tight")
    return Report([table], figures, remarks(runs, settings))


def _cell(runs: list[dict], row: str, name: str) -> str | None:
    values = [run["scores"][row][name] for run in runs]
    if None in values:
        return None
    _, unit, digits = COLUMNS[name]
    return Estimate.of([unit * value for value in values], digits)


def draw(entry: dict):
    """The four maps of one frame."""
    prediction = torch.tensor(entry["prediction"])
    probs = functional.one_hot(prediction, len(CLASSES)).movedim(-1, 0)
    maps = torch.tensor(entry["image"]).byte().numpy(), probs.numpy(), entry["uncertainty"]
    words = {"class_names": CLASSES, "label": "variance, mean over the classes"}
    return plots.segmentation_maps(*maps, truth=entry["truth"], **words).figure


def remarks(runs: list[dict], settings: Settings) -> list[str]:
    ratio, error = mean_and_error([run["scores"][SHOWN]["border_ratio"] for run in runs])
    sure = "as the paper's maps show" if ratio > 1 else "not as the paper's maps show"
    if agrees(ratio, error, 1.0):
        sure = "no sure difference by two standard errors; the paper's maps show one"
    return [
        "The paper shows maps and prints no number for segmentation.",
        f"The variance within {settings.border} pixels of a border is {ratio:.1f} times that elsewhere, {sure}.",
        "The network is small and trained here from scratch; the paper's is the published Bayesian SegNet. The query "
        "is not part of the batch whose statistics are drawn; in the authors' code it is.",
    ]
