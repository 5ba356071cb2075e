"""A user's code, never run: `make lint` has mypy check it, strictly."""

from collections.abc import Iterator
from datetime import date

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import assert_type

import bnuq_ext as bnuq


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 3)

    def logits(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]  # torch's modules return Any


class Flat:
    """A prior of the user's own."""

    def divergence(
        self, mu: Tensor, rho: Tensor, seed: Tensor, stream: int, num_samples: int
    ) -> Tensor:
        return 0 * (mu.sum() + rho.sum())


def batch_norm(x: Tensor, y: Tensor, batches: Iterator[dict[str, Tensor]]) -> None:
    data: Dataset[tuple[Tensor, ...]] = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = Net()
    model = bnuq.convert(model, filter_fn=lambda name, module: name != "norm")
    model = bnuq.convert(model, inplace=True, strict=False)
    bank = assert_type(bnuq.collect(model, loader), bnuq.Bank)
    bnuq.collect(model, data, 8, batch_size=16, device="cpu", progress=False)
    bnuq.collect(model, batches, input_fn=lambda batch: batch["x"])
    assert_type(bank.mean["norm"], Tensor)
    assert_type(bank.batch_size + len(bank), int)
    bank.save("bank.safetensors")
    bnuq.attach(model, assert_type(bnuq.Bank.load("bank.safetensors"), bnuq.Bank))
    bnuq.Bank({"norm": x}, {"norm": x}, {"norm": x}, batch_size=16)
    print(bnuq.doctor(model, x).converted["norm"] + 1)
    bnuq.freeze(model, statistics=False)
    with bnuq.replicas(model, 4, 0, sampler="joint"):
        model.logits(x)
    bnuq.revert(model).logits(x)
    bnuq.register_adapter("package.module.Norm", lambda module: nn.BatchNorm2d(8))


def predictions(model: Net, x: Tensor, y: Tensor, loader: DataLoader[list[Tensor]]) -> None:
    pred = assert_type(bnuq.predict(model, x, likelihood="categorical"), bnuq.Prediction)
    pred.mean.argmax(1), pred.variance.max(), pred.entropy.mean().item()
    pred.mutual_information.topk(3), pred.snapshots.tolist(), pred.samples.shape
    bnuq.predict(model, (x, x), likelihood="gaussian", noise_var=0.1).total_variance.sqrt()
    bnuq.predict(model, {"x": x}, likelihood="gaussian", output_fn=lambda out: out["mean"])
    bnuq.predict(model, loader, likelihood="categorical", sampler="batch", loader=loader)
    bnuq.plug_in(model, loader, likelihood="categorical").targets.tolist()
    bnuq.mc_dropout(model, x, likelihood="categorical", num_samples=4).entropy.mean()
    bnuq.ensemble([model, model], x, likelihood="categorical").entropy.mean()
    bnuq.Prediction.from_samples(x[None], "gaussian").variance.mean()
    fit = bnuq.fit_batch_size(model, TensorDataset(x, y), [8, 16], likelihood="categorical")
    assert_type(fit.batch_sizes, Tensor)
    print(bnuq.statistics_normality(model, TensorDataset(x, y), 16).layers["norm"].std_ratio)


def weights(x: Tensor, y: Tensor) -> None:
    mixture = bnuq.ScaleMixturePrior(0.5, 1.0, 0.1)
    own = bnuq.BayesLinear(8, 4, prior=Flat(), device="cpu")
    model = nn.Sequential(own, nn.ReLU(), bnuq.BayesLinear(4, 2, False, prior=mixture))
    weight = bnuq.kl_weight(0, 10, scheme="geometric")
    out = assert_type(bnuq.elbo_loss(model, x, y, batch_weight=weight), bnuq.vi.Elbo)
    (out.nll + bnuq.kl_divergence(model, 2, seed=0)).backward()  # type: ignore[no-untyped-call]  # torch's
    assert_type(bnuq.to_bayesian(Net(), prior=mixture), Net)
    assert_type(bnuq.prune(model, 0.5, by="magnitude"), float)
    assert_type(bnuq.posterior_summary(model).snr, Tensor)
    seed = bnuq.ops.new_seed(0, device=x.device)
    noise = assert_type(bnuq.ops.philox_normal(seed, 0, (3, 4, 8)), Tensor)
    bnuq.ops.bayes_linear(x, noise[0], noise[0], seed=seed, stream=0, num_samples=3).sum()
    bnuq.ops.predictive_statistics(x[None]).expected_entropy.sum()


def scores_and_figures(pred: bnuq.Prediction, y: Tensor, folder: str) -> None:
    assert_type(bnuq.metrics.ece(pred.mean, y), Tensor)
    assert_type(bnuq.metrics.evaluate(pred, y)["nll"], float)
    split = bnuq.data.mnist(folder, num_validation=1000)
    assert_type(bnuq.data.digits(classes=[0, 1]).train.x, Tensor)
    assert_type(split.test.y, Tensor)
    ax = Figure().subplots()
    assert_type(bnuq.plots.reliability_diagram(pred.mean, y, ax=ax), Axes)
    bnuq.plots.entropy_cdf({"seen": pred.entropy, "new": np.ones(3)}, num_classes=10)
    bnuq.plots.against_batch_size([8, 16], {"MCBN": [0.5, 0.4]}, ylabel="nats", marks={16: "M"})
    bnuq.plots.uncertainty_error([0.0], [1.0], y, color=(0.1, 0.2, 0.3), window=1)
    bnuq.plots.regression_band([date(2024, 1, 1)], [0.0], [1.0])
