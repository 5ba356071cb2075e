"""Stochastic batch norm on scikit-learn's digits: noisy inputs and unseen classes,
over several seeds.

A small network with batch norm is trained on few images. Its predictions by ordinary batch norm
(plug-in, also with a temperature fitted on clean validation data) stand beside those of T replicas
by three samplers. The number of epochs was set so that plug-in BN has the NLL of an earlier trial
at noise 0.35 (1.42); nothing else was chosen by looking at the test part.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import Prediction, __version__, convert, data, metrics, predict
from ..ops.checks import check_within
from ..progress import progress_bar
from ..restore import one_thread
from .fitting import batch_norm_chain, collect_random, train_epoch
from .store import Store

PLUG_IN, TEMPERATURE = "plug-in BN", "plug-in, temperature"
SAMPLERS = {"MCBN (bank)": "bank", "joint": "joint", "lognormal": "lognormal"}
ROWS = (PLUG_IN, TEMPERATURE, *SAMPLERS)


@dataclass(frozen=True)
class Settings:
    """What the results depend on. Pixels lie in [0, 1]; noise is added to them unclipped."""

    num_seeds: int = 10
    num_train: int = 300
    num_validation: int = 300
    widths: tuple[int, ...] = (128, 128, 128)
    train_batch_size: int = 16
    epochs: int = 80
    learning_rate: float = 1e-3
    num_batches: int = 64
    num_samples: int = 64
    noise_stds: tuple[float, ...] = (0.0, 0.25, 0.35, 0.5)
    known_classes: int = 5
    curve_noise_std: float = 0.35
    curve_batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 300)

    def split(self, seed: int, classes=range(10)) -> data.Split:
        sizes = {"num_train": self.num_train, "num_validation": self.num_validation}
        return data.digits(**sizes, seed=seed, classes=classes)


QUICK = Settings(
    num_seeds=2,
    epochs=2,
    num_batches=8,
    num_samples=8,
    noise_stds=(0.0, 0.35),
    curve_batch_sizes=(8, 16, 300),
)


def with_seeds(settings: Settings, num_seeds: int) -> Settings:
    check_within("demo", "seeds", num_seeds, 1, 2**24, "[1, 2^24)")
    return replace(settings, num_seeds=num_seeds)


class Outcome(NamedTuple):
    """A prediction: probs (N, K), entropy (N,) of them and mutual information (N,) in nats."""

    probs: Tensor
    entropy: Tensor
    information: Tensor


def train(part: data.Part, num_classes: int, settings: Settings) -> nn.Sequential:
    """A network from 64 pixels to logits, trained by Adam with a constant rate."""
    network = batch_norm_chain(64, settings.widths, num_classes, bias=True)
    optimizer = torch.optim.Adam(network.parameters(), settings.learning_rate, fused=True)
    for _ in range(settings.epochs):
        train_epoch(network, optimizer, functional.cross_entropy, *part, settings.train_batch_size)
    return network.eval()


class Fitted(NamedTuple):
    """A trained and converted network with its bank, and the temperature of its validation part."""

    model: nn.Module
    temperature: float


def fit(split: data.Split, num_classes: int, settings: Settings) -> Fitted:
    model = convert(train(split.train, num_classes, settings))
    collect_random(model, split.train.x, settings.num_batches, settings.train_batch_size)
    with torch.no_grad():
        logits = model(split.validation.x)
    return Fitted(model, metrics.fit_temperature(logits, split.validation.y))


def sampled(model: nn.Module, x: Tensor, settings: Settings, *, seed=0, **options) -> Prediction:
    samples = settings.num_samples
    return predict(model, x, likelihood="categorical", num_samples=samples, seed=seed, **options)


def outcomes(fitted: Fitted, x: Tensor, settings: Settings, seed: int) -> dict[str, Outcome]:
    """The prediction of every row of the table."""
    with torch.no_grad():
        logits = fitted.model(x)
    result = {}
    for row, scale in ((PLUG_IN, 1.0), (TEMPERATURE, fitted.temperature)):
        probs = (logits / scale).softmax(1)
        entropy = metrics.predictive_entropy(probs[None], reduction="none")
        result[row] = Outcome(probs, entropy, torch.zeros_like(entropy))
    for row, sampler in SAMPLERS.items():
        pred = sampled(fitted.model, x, settings, sampler=sampler, seed=seed)
        result[row] = Outcome(pred.mean, pred.entropy, pred.mutual_information)
    return result


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(probs, y).item(),
        "nll": metrics.nll(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
    }


def noisy_inputs(settings: Settings, seed: int) -> dict:
    """Scores of one seed on the test part, per noise and row."""
    split = settings.split(seed)
    fitted = fit(split, 10, settings)
    result = {"temperature": fitted.temperature}
    for std in settings.noise_stds:
        x = data.add_noise(split.test.x, std, seed=seed)
        predicted = outcomes(fitted, x, settings, seed)
        result[str(std)] = {row: scores(o.probs, split.test.y) for row, o in predicted.items()}
    return result


def known_and_unseen(settings: Settings, seed: int) -> tuple[Fitted, data.Split, Tensor]:
    """A network of the first classes, their split, and every image (N, 64) of the others."""
    known = range(settings.known_classes)
    split = settings.split(seed, known)
    others = data.digits(num_train=10, num_validation=10, classes=range(len(known), 10))
    return fit(split, len(known), settings), split, torch.cat([part.x for part in others])


def unseen_classes(settings: Settings, seed: int) -> dict:
    """Scores of one seed, trained on the first classes: on their test part,
    and how the others stand out."""
    fitted, split, others = known_and_unseen(settings, seed)
    seen = outcomes(fitted, split.test.x, settings, seed)
    unseen = outcomes(fitted, others, settings, seed)
    return {
        row: {
            "accuracy": metrics.accuracy(seen[row].probs, split.test.y).item(),
            "nll": metrics.nll(seen[row].probs, split.test.y).item(),
            "entropy_seen": seen[row].entropy.mean().item(),
            "entropy_unseen": unseen[row].entropy.mean().item(),
            "auroc_entropy": metrics.auroc(seen[row].entropy, unseen[row].entropy).item(),
            "auroc_information": metrics.auroc(
                seen[row].information, unseen[row].information
            ).item(),
        }
        for row in ROWS
    }


def batch_size_curve(settings: Settings) -> dict:
    """Mutual information and NLL of one network against the batch size M of its statistics.

    A fresh bank is collected per M. The replicas run one after another, since a matrix product may
    round a row differently in a folded batch: at M = N all are the same network
    and the information is exactly 0.
    """
    split = settings.split(0)
    model = fit(split, 10, settings).model
    inputs = {
        "clean": split.test.x,
        "noisy": data.add_noise(split.test.x, settings.curve_noise_std, seed=0),
    }
    result = {name: {"mutual_information": [], "nll": []} for name in inputs}
    for M in settings.curve_batch_sizes:
        collect_random(model, split.train.x, settings.num_batches, M)
        for name, x in inputs.items():
            pred = sampled(model, x, settings, strategy="loop", keep_samples=True)
            information = metrics.mutual_information(pred.samples.softmax(2)).item()
            result[name]["mutual_information"].append(information)
            result[name]["nll"].append(metrics.nll(pred.mean, split.test.y).item())
    with torch.no_grad():
        for name, x in inputs.items():
            result[name]["plug_in_nll"] = metrics.nll(model(x).softmax(1), split.test.y).item()
    return result


def confident_error(settings: Settings) -> dict:
    """Of the noisy test images that plug-in BN gets wrong with over 90 %, the one its replicas
    dispute most; where there is none, the wrong one that it is surest of."""
    split = settings.split(0)
    fitted = fit(split, 10, settings)
    x = data.add_noise(split.test.x, settings.curve_noise_std, seed=0)
    with torch.no_grad():
        plug_in = fitted.model(x).softmax(1)
    pred = sampled(fitted.model, x, settings, keep_samples=True)
    confidence, guess = plug_in.max(1)
    wrong = guess != split.test.y
    sure = wrong & (confidence > 0.9)
    # The sure ones come first: no confidence exceeds 1.
    row = torch.where(sure, 1 + pred.mutual_information, confidence * wrong).argmax().item()
    return {
        "clean": split.test.x[row].view(8, 8).tolist(),
        "image": x[row].view(8, 8).tolist(),
        "truth": split.test.y[row].item(),
        "plug_in": plug_in[row].tolist(),
        "replicas": pred.samples[:, row].softmax(1).tolist(),
        "confident_errors": sure.sum().item(),
        "test_images": len(x),
    }


def entropies(settings: Settings) -> dict:
    """Predictive entropies of seed 0 on known and unseen classes, per row."""
    fitted, split, others = known_and_unseen(settings, 0)
    return {
        name: {row: o.entropy.tolist() for row, o in outcomes(fitted, x, settings, 0).items()}
        for name, x in (("seen", split.test.x), ("unseen", others))
    }


def alone(seed: int, compute):
    """compute() with torch's generator seeded, on one thread; both are left as found.

    A second thread gains nothing on matrices this small,
    and costs tenfold where the cores are busy.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return compute()


def run(folder, settings: Settings, *, progress: bool = True) -> dict:
    """Everything that the report needs, from `folder` where a run before left it there.

    Returns:
        dict of the units' results: "curve", "verdict", "entropies", and "noisy-<seed>",
        "unseen-<seed>".
    """
    fixed = {k: v for k, v in asdict(settings).items() if k != "num_seeds"}
    store = Store(folder, {**fixed, "bnuq_ext": __version__, "torch": torch.__version__})
    units = {
        "curve": (0, batch_size_curve),
        "verdict": (0, confident_error),
        "entropies": (0, entropies),
    }
    for seed in range(settings.num_seeds):
        units[f"noisy-{seed}"] = (seed, partial(noisy_inputs, seed=seed))
        units[f"unseen-{seed}"] = (seed, partial(unseen_classes, seed=seed))
    done = {}
    shown = progress_bar(units.items(), "digits", unit="unit", shown=progress)
    for name, (seed, compute) in shown:
        done[name] = store.unit(name, partial(alone, seed, partial(compute, settings)))
    return done
