"""Bayes by Backprop on MNIST, with the settings of A. Singh's report (after Blundell et al. 2015,
section 5.1).

A network of two hidden layers is trained by plain SGD on the summed loss of a batch,

    nll(batch) + kl_weight(i, M) * KL(posterior || prior),

with the divergence of every layer in it (the code of the report counts the second layer's posterior
twice and leaves the last one's out). One run per prior; a killed run goes on after its last epoch
and comes to the same numbers: the order of the images and the noise of every step are functions of
the seed and of the step's number.
"""

import hashlib
import json
import math
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .. import (
    BayesLinear,
    GaussianPrior,
    ScaleMixturePrior,
    __version__,
    data,
    elbo_loss,
    kl_weight,
    predict,
)
from ..data.parts import as_path, check_classes
from ..ops.checks import check_one_of, refuse
from ..progress import progress_bar
from ..vi import SCHEMES
from .store import Store, write_json, write_whole

CLASSES = 10
CHECKPOINT = "checkpoint.safetensors"
PRIORS = {
    "gaussian": GaussianPrior(1.0),
    "mixture": ScaleMixturePrior(0.5, 1.0, math.exp(-6)),
    "mixture-quarter": ScaleMixturePrior(0.25, 1.0, math.exp(-6)),
    "mixture-narrow": ScaleMixturePrior(0.5, 1.0, math.exp(-8)),
}
# Of pixels in [0, 1]; named by what the report does to those in [0, 255].
SCALINGS = {
    "255": lambda x: x,
    "standard": lambda x: (x - 0.1307) / 0.3081,
    "126": lambda x: x * (255 / 126),
}
# What a seed is for: these keep the streams of random numbers apart.
ORDER, STEP, TEST = range(3)


@dataclass(frozen=True)
class Settings:
    """What the numbers depend on, but for the data and the prior; the report's, unless changed."""

    hidden: int = 400
    epochs: int = 600
    scheme: str = "geometric"
    scaling: str = "255"
    num_samples: int = 2
    test_samples: int = 10
    batch_size: int = 100
    learning_rate: float = 1e-3
    mu_init: tuple[float, float] = (-0.2, 0.2)
    rho_init: tuple[float, float] = (-5.0, -4.0)
    seed: int = 0

    def __post_init__(self):
        for name in ("hidden", "epochs", "num_samples", "test_samples", "batch_size"):
            if not 1 <= getattr(self, name) < 2**24:
                refuse("bbb", name, "lie in [1, 2^24)", getattr(self, name))
        for name, known in (("scheme", SCHEMES), ("scaling", SCALINGS)):
            check_one_of("bbb", name, getattr(self, name), known)
        if not 0 <= self.seed < 2**20:
            refuse("bbb", "seed", "lie in [0, 2^20)", self.seed)

    def key(self, purpose: int, number: int) -> int:
        """The seed of a thing that is drawn once: below 2^63, another for each
        (seed, purpose, number)."""
        return (self.seed << 42) | (purpose << 40) | number


@dataclass
class State:
    """A run after some epochs.

    Attributes:
        network: as trained.
        best: the state_dict at the least validation error.
        log: one entry per epoch, see `train_epoch` and `run_epoch`.
    """

    network: nn.Sequential
    best: dict[str, Tensor]
    log: list[dict]

    @property
    def best_epoch(self) -> int:
        """The first epoch, counted from 1, with the least validation error."""
        return 1 + min(range(len(self.log)), key=lambda i: self.log[i]["validation_error"])

    def load_best(self) -> nn.Sequential:
        """The network, with the weights of the best epoch from now on."""
        self.network.load_state_dict(self.best)
        return self.network


def load_data(root, scaling: str) -> data.Split:
    """MNIST from the folder `root` or its `mnist`, or without one scikit-learn's digits,
    split 1,200, 297, 300."""
    if root is None:
        split = data.digits(num_train=1200, num_validation=297)
    else:
        folder = as_path("bbb", "data_root", root) / "mnist"
        split = data.mnist(folder if folder.is_dir() else root)
    check_classes("bbb", split, CLASSES)
    scale = SCALINGS[scaling]
    return data.Split(*(data.Part(scale(x), y) for x, y in split))


def make_network(settings: Settings, inputs: int, prior) -> nn.Sequential:
    """inputs-h-h-10 with ReLUs, drawn from the seed: the same for every prior."""
    options = {"prior": prior, "mu_init": settings.mu_init, "rho_init": settings.rho_init}
    h = settings.hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return nn.Sequential(
            BayesLinear(inputs, h, **options),
            nn.ReLU(),
            BayesLinear(h, h, **options),
            nn.ReLU(),
            BayesLinear(h, CLASSES, **options),
        )


def train_epoch(network, part: data.Part, settings: Settings, epoch: int, advance) -> dict:
    """One pass over the images in the order of this epoch (from 0); `advance()` after every step.

    Returns:
        dict: "loss" and "nll" in nats per image, "kl" in nats, the mean over the steps.
    """
    optimizer = torch.optim.SGD(network.parameters(), settings.learning_rate, fused=True)
    generator = torch.Generator().manual_seed(settings.key(ORDER, epoch))
    batches = torch.randperm(len(part.x), generator=generator).split(settings.batch_size)
    totals = torch.zeros(3, dtype=torch.float64)
    network.train()
    for i, rows in enumerate(batches):
        optimizer.zero_grad()
        terms = elbo_loss(
            network,
            part.x[rows],
            part.y[rows],
            num_samples=settings.num_samples,
            batch_weight=kl_weight(i, len(batches), settings.scheme),
            reduction="sum",
            seed=settings.key(STEP, epoch * len(batches) + i),
        )
        terms.loss.backward()
        optimizer.step()
        totals += torch.stack(terms).detach()
        advance()
    loss, nll, kl = totals.tolist()
    return {"loss": loss / len(part.x), "nll": nll / len(part.x), "kl": kl / len(batches)}


def error(network: nn.Module, part: data.Part, settings: Settings, number: int) -> float:
    """The fraction of images that the mean prediction of the samples
    and the posterior mean gets wrong.

    Args:
        number: of the draw of the samples.
    """
    network.eval()
    T, seed = settings.test_samples, settings.key(TEST, number)
    sampled = predict(network, part.x, likelihood="categorical", num_samples=T, seed=seed).mean
    with torch.no_grad():
        total = T * sampled + network(part.x).softmax(1)
    return (total.argmax(1) != part.y).sum().item() / len(part.y)


def run_epoch(state: State, split: data.Split, settings: Settings, advance) -> None:
    """Train an epoch, test, and note both; "seconds" are those of the training,
    "test_seconds" of the two tests."""
    epoch, start = len(state.log), time.perf_counter()
    entry = {
        "epoch": epoch + 1,
        **train_epoch(state.network, split.train, settings, epoch, advance),
    }
    if not math.isfinite(entry["loss"]):
        refuse("bbb", "loss", "stay finite", f"{entry['loss']} in epoch {epoch + 1}")
    trained = time.perf_counter()
    entry["validation_error"] = error(state.network, split.validation, settings, epoch)
    entry["test_error"] = error(state.network, split.test, settings, epoch)
    entry["seconds"], entry["test_seconds"] = trained - start, time.perf_counter() - trained
    state.log.append(entry)
    if state.best_epoch == len(state.log):
        state.best = {k: v.clone() for k, v in state.network.state_dict().items()}


def save(path: Path, state: State, identity: str = "") -> None:
    """The whole state in one file, which is replaced as a whole; `identity`: whose state it is."""
    parts = {"last": state.network.state_dict(), "best": state.best}
    tensors = {f"{part}.{k}": v for part, found in parts.items() for k, v in found.items()}
    log = json.dumps(state.log)
    metadata = {"log": log, "sha256": digest(identity, log, tensors)}
    write_whole(path, safetensors.torch.save(tensors, metadata))


def digest(identity: str, log: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over whose state it is, the log, and the names and the data of the tensors."""
    found = hashlib.sha256(f"{identity}\0{log}".encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().numpy())
    return found.hexdigest()


def load(path: Path, network: nn.Sequential, identity: str = "") -> State:
    """The state that `save` wrote with this identity; a new one where there is no file."""
    if not path.exists():
        return State(network, {}, [])
    if path.is_dir():
        refuse("bbb", str(path), "be a file", "a folder")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # it is no dict
        if digest(identity, metadata["log"], tensors) != metadata["sha256"]:
            raise ValueError("other content than its SHA-256, or that of another run")
        best, last = (
            {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
            for part in ("best.", "last.")
        )
        for state in (best, last):
            network.load_state_dict(state)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        requirement = "be a checkpoint of this network (delete it to start again)"
        refuse("bbb", str(path), requirement, error)
    return State(network, best, json.loads(metadata["log"]))


def resumed(store: Store, name: str, split: data.Split, settings: Settings) -> State:
    """The state of the run with the prior `name`, from its checkpoint in the folder `name` of the store.

    A checkpoint of other settings than the store's, of another prior or of more epochs is refused.
    """
    folder = store.folder / name
    network = make_network(settings, split.train.x.shape[1], PRIORS[name])
    state = load(folder / CHECKPOINT, network, identity_of(store, name))
    if len(state.log) > settings.epochs:
        requirement = f"be at least the {len(state.log)} that {folder} holds"
        refuse("bbb", "epochs", requirement, settings.epochs)
    return state


def identity_of(store: Store, name: str) -> str:
    return json.dumps([name, store.settings], sort_keys=True)


def train(
    store: Store, name: str, state: State, split: data.Split, settings: Settings, progress=True
) -> None:
    """The epochs that are left of a run; its checkpoint is written after every one.

    Beside it lies `log.json`, the log alone. The store is claimed before an epoch is written.
    """
    folder = store.folder / name
    folder.mkdir(exist_ok=True)
    steps = math.ceil(len(split.train.x) / settings.batch_size)
    done = {"total": settings.epochs * steps, "initial": len(state.log) * steps}
    if state.log:
        write_beside(store, folder, state)
    with progress_bar(desc=name, unit="batch", shown=progress, **done) as bar:
        while len(state.log) < settings.epochs:
            run_epoch(state, split, settings, bar.update)
            # Before the checkpoint: a run that is killed in between does the epoch,
            # and its log, again.
            write_beside(store, folder, state)
            save(folder / CHECKPOINT, state, identity_of(store, name))
            validation = state.log[-1]["validation_error"]
            bar.set_postfix_str(f"validation={validation:.2%}", refresh=False)


def write_beside(store: Store, folder: Path, state: State) -> None:
    """Writes what lies beside a checkpoint: whose folder it is, and the log."""
    store.claim()
    write_json(folder / "log.json", state.log)


def run(
    folder, priors, settings: Settings, *, data_root=None, progress: bool = True
) -> tuple[data.Split, dict[str, State]]:
    """A run per prior, each from where one before left it in `folder`; more epochs continue a run.

    Args:
        folder: where the checkpoints lie; made if it does not exist.
            Its first epoch claims it for the settings and the data.
        priors: names in `PRIORS`.
        settings: see `Settings`.
        data_root: see `load_data`.
        progress: show a bar on stderr; where that is no terminal, a line a minute.

    Returns:
        the data, and the state by prior.

    Raises:
        ValueError: an unknown prior, the folder of another run or of one with more epochs,
            missing data, a loss that is not finite.
    """
    for name in priors:
        check_one_of("bbb", "prior", name, PRIORS)
    split = load_data(data_root, settings.scaling)
    fixed = {k: v for k, v in asdict(settings).items() if k != "epochs"}
    versions = {"bnuq_ext": __version__, "torch": torch.__version__}
    store = Store(folder, {**fixed, **versions, "data": crc32_of(split)})
    # All checkpoints are checked before hours go into one.
    states = {name: resumed(store, name, split, settings) for name in dict.fromkeys(priors)}
    for name, state in states.items():
        train(store, name, state, split, settings, progress)
    return split, states


def crc32_of(split: data.Split) -> int:
    """CRC-32 of all images and labels."""
    crc = 0
    for tensor in (t for part in split for t in part):
        crc = zlib.crc32(tensor.contiguous().numpy(), crc)
    return crc
