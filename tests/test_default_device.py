"""A default device other than the model's, as after torch.set_default_device("cuda"):
nothing goes there. And another default dtype."""

import operator

import numpy as np
import pytest
import torch
from predicting import DATA, SAMPLERS, X, make_model, predict
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import data, metrics, plots

BATCHES = list(DATA.split(16))
DATASET = torch.utils.data.TensorDataset(DATA)
FEW = {"classes": [0, 1], "num_train": 50, "num_validation": 50}


def on_meta(run):
    """The result with meta as the default device, where nothing can be computed, and without."""
    results = []
    for device in (torch.device("meta"), torch.device("cpu")):
        model = make_model()
        torch.manual_seed(0)
        with device:
            results.append(run(model))
    return results


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [3, None])
def test_predict(sampler, seed):
    actual, expected = on_meta(lambda m: predict(m, sampler=sampler, seed=seed))
    assert torch.equal(actual.mean, expected.mean)


def test_collect():
    options = dict(progress=False)
    for batches, more in ((BATCHES, {}), (DATASET, dict(batch_size=16))):
        actual, expected = on_meta(lambda m: bnuq.collect(m, batches, 8, **options, **more))  # noqa: B023
        assert actual.equal(expected)
        made = on_meta(lambda m: bnuq.Bank(m[1].bank.mean, m[1].bank.var, 16, batch_size=16))
        assert made[0].equal(made[1])


def test_replicas_fold_with_gradients():
    def run(model):
        with bnuq.replicas(model, 3, seed=0):
            y = model(X)
        y.sum().backward()
        return y, model[0].weight.grad

    for actual, expected in zip(*on_meta(run), strict=True):
        assert torch.equal(actual, expected)


CALLS = []


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = bnuq.BayesLinear(4, 3, prior=bnuq.ScaleMixturePrior(), device="cpu")

    def forward(self, x):
        CALLS.append(len(x))
        return self.layer(x)


def test_training_and_pruning():
    x, y = torch.randn(6, 4), torch.arange(6) % 3

    def run(_):
        with torch.device("cpu"):
            model = Wrapped()
        losses = []
        for seed in (1, 2, None):
            CALLS.clear()
            out = bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=0.1, seed=seed)
            losses.append(out.loss)
        assert len(CALLS) == 1  # the samples went together
        bnuq.prune(model, 0.5)
        return torch.stack(losses), model.layer.weight_mask

    for actual, expected in zip(*on_meta(run), strict=True):
        assert torch.equal(actual, expected)


def test_reports():
    def run(model):
        found = bnuq.statistics_normality(model, DATASET, batch_size=16, num_batches=8, seed=0)
        return str(found)

    actual, expected = on_meta(run)
    assert actual == expected


def test_data_and_scores(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "image.npy", np.full((2, 2), 9, np.uint8))
    probs, y = torch.tensor([[0.2, 0.8], [0.7, 0.3]]), torch.tensor([1, 0])
    pred = bnuq.Prediction.from_samples(torch.tensor([[[0.0]], [[1.0]]]), "gaussian", noise_var=0.1)
    q = bnuq.analytic_statistics(X, 4, 90)
    prior = bnuq.StatisticsGaussian(0.0, 1.0, 0.0, 1.0)

    def run(_):
        return [
            *data.digits(**FEW).train,
            *data.image_folder(tmp_path),
            data.add_noise(X, 0.1, seed=1),
            *bnuq.implied_prior(1e-4, 200),
            bnuq.statistics_kl(q, prior),
            *metrics.evaluate(pred, probs[:1, :1]).values(),
            *metrics.t_test([1.0, 2.0, 3.0]),
            plots.reliability_diagram(probs, y).get_title(),
        ]

    for actual, expected in zip(*on_meta(run), strict=True):
        same = torch.equal if isinstance(actual, torch.Tensor) else operator.eq
        assert same(actual, expected)
    assert data.digits(**FEW).train.y.unique().tolist() == FEW["classes"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_noise_has_the_data_s_dtype(dtype):
    expected = data.add_noise(X, 0.1, seed=0)
    try:
        torch.set_default_dtype(dtype)
        assert torch.equal(data.add_noise(X, 0.1, seed=0), expected)
    finally:
        torch.set_default_dtype(torch.float32)
