"""`statistics_normality` and its test of normality: calibration, known answers,
and what theory gets wrong."""

import copy
import math

import numpy as np
import pytest
import torch
from normals import draw
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import bnuq_ext as bnuq
from bnuq_ext.normality import lilliefors


@pytest.mark.parametrize("n", [8, 50, 256])
def test_p_values_are_uniform_for_normal_samples(n):
    """KS of 4,000 p-values, alpha 1e-6: finds (power 0.99)
    a share of p < x that is off by 0.055 somewhere."""
    p = lilliefors(3 + 2 * draw(n, 4000, seed=n))[1]
    assert stats.kstest(p.numpy(), "uniform").pvalue > 1e-6
    # 5 standard errors of a share of 4,000, and the simulation's.
    for level in (0.01, 0.05, 0.1):
        error = (level * (1 - level) * (1 / 4000 + 1 / 20_000)) ** 0.5
        assert abs((p < level).double().mean() - level) < 5 * error


def test_p_value_is_that_of_scipys_simulation():
    values = draw(30, 3).exp().sqrt()
    distance, p = lilliefors(values)
    for c in range(3):
        rng = np.random.default_rng(0)
        expected = stats.goodness_of_fit(
            stats.norm, values[:, c].numpy(), statistic="ks", n_mc_samples=4000, rng=rng
        )
        error = (p[c] * (1 - p[c]) * (1 / 4000 + 1 / 20_000)) ** 0.5 + 1 / 4000
        assert abs(p[c] - expected.pvalue) < 5 * error
        z = stats.zscore(values[:, c].numpy(), ddof=1)
        assert math.isclose(distance[c], stats.kstest(z, "norm").statistic, rel_tol=1e-12)


def test_finds_what_is_not_normal_and_not_scale_or_place():
    n = draw(200, 20, seed=3)
    for other in (n.square(), n.exp(), n.sign() + 0.3 * n):
        assert (lilliefors(other)[1] < 1e-3).all()
    assert (lilliefors(n.exp())[1] == 1 / 20_001).all()  # further out than all 20,000
    close = lilliefors(n)[1], lilliefors(1e6 * n.float() - 5)[1]
    torch.testing.assert_close(*close, rtol=0, atol=1e-2)


def test_constant_column_has_no_p_value():
    distance, p = lilliefors(torch.stack([torch.full((9,), 0.1), draw(9).float()], 1))
    assert distance.isnan().tolist() == p.isnan().tolist() == [True, False]
    assert distance.dtype == p.dtype == torch.float64


def test_lilliefors_rejects():
    with pytest.raises(TypeError, match="lilliefors: values must be a floating-point tensor"):
        lilliefors(torch.ones(9, 2).long())
    with pytest.raises(ValueError, match=r"have shape \(n, C\) with n at least 4, got \[3, 2\]"):
        lilliefors(torch.ones(3, 2))


def mlp(width=48):
    torch.manual_seed(0)
    widths = [(10, width), (width, width), (width, width)]
    blocks = [(nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU()) for i, o in widths]
    return nn.Sequential(*(m for block in blocks for m in block))


def convolutional():
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


ROWS = TensorDataset(draw(800, 10).float())
IMAGES = TensorDataset(draw(300, 1, 8, 8).float() + draw(300, 1, 1, 1, seed=1).float())


def normality(model, data=ROWS, batch_size=32, **options):
    return bnuq.statistics_normality(model, data, batch_size, **{"seed": 1, **options})


def test_theory_is_right_in_the_first_layer_and_thirty_times_too_wide_behind_it(device):
    """1,000 batches: a variance has a relative standard error of 4.5 %,
    the median of 48 of them less."""
    found = normality(bnuq.convert(mlp()).to(device), num_batches=1000)
    first, *deeper = found.layers.values()
    assert 0.93 < first.mean_ratio.median() < 1.07 and 0.9 < first.std_ratio.median() < 1.1
    assert (first.mean_ratio - 1).abs().max() < 5 * 0.045
    for layer in deeper:
        assert 15 < layer.mean_ratio.median() < 60
        assert 0.8 < layer.std_ratio.median() < 2


def test_rows_are_the_units_of_a_convolutional_layer():
    """The rows' own level dominates: with positions as units the variance would be 36 times too
    small."""
    found = normality(bnuq.convert(convolutional()), IMAGES, num_batches=1000)
    first = found.layers["1"]
    assert ((first.mean_ratio - 1).abs() < 5 * 0.045).all()
    assert ((first.std_ratio - 1).abs() < 0.3).all()  # an expansion for large batches
    torch.testing.assert_close(first.correlation, first.analytic_correlation, rtol=0, atol=0.15)


@pytest.mark.parametrize(("make", "data"), [(mlp, ROWS), (convolutional, IMAGES)])
@pytest.mark.parametrize("rows_at_a_time", [64, 10_000])
def test_analytic_is_that_of_the_inputs_over_the_data(make, data, rows_at_a_time):
    net, captured = make().eval(), {}
    found = normality(bnuq.convert(net), data, num_batches=8, rows_at_a_time=rows_at_a_time)
    for name, mean in found.bank.mean.items():
        layer = net.get_submodule(name)
        layer.running_mean.copy_(mean.mean(0))
        layer.running_var.copy_(found.bank.var[name].mean(0))
        layer.register_forward_pre_hook(lambda _, x, name=name: captured.update({name: x[0]}))
    net(data.tensors[0])
    for name, layer in found.layers.items():
        x = captured[name].detach().double()
        expected = bnuq.analytic_statistics(x, 32, len(data))
        torch.testing.assert_close(layer.analytic, expected, rtol=1e-4, atol=1e-6)
        h = x.unsqueeze(-1).flatten(2) - expected.mean[:, None]
        pairs = zip(h.mean(2).T, h.square().mean(2).T, strict=True)
        correlations = [np.corrcoef(a, c)[0, 1] for a, c in pairs]
        np.testing.assert_allclose(layer.analytic_correlation, correlations, atol=1e-4)


def test_moments_are_those_of_eval_and_behind_what_the_layer_does_besides():
    """Dropout is off, and an adapter's activation belongs to what the next layer is given."""

    class Rectified(bnuq.StochasticBatchNorm1d):
        def finish(self, y):
            return y.relu()

    plain, own = mlp(16), mlp(16)
    own = nn.Sequential(*own[:2], *own[3:5])
    plain = nn.Sequential(*plain[:3], nn.Dropout(0.5), *plain[3:5])
    plain, own = bnuq.convert(plain).train(), bnuq.convert(own)
    own[1].__class__ = Rectified
    ours = normality(own, num_batches=8).layers["3"].analytic
    theirs = normality(plain, num_batches=8).layers["5"].analytic
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_observed_is_over_the_batches_of_collect():
    model = bnuq.convert(mlp())
    found = normality(model, num_batches=20)
    torch.manual_seed(1)
    bank = bnuq.collect(model, ROWS, 20, batch_size=32)
    assert bank.equal(found.bank) and (found.batch_size, found.dataset_size) == (32, 800)
    mean, std = (t["4"].double().numpy() for t in (bank.mean, {"4": bank.var["4"].sqrt()}))
    layer = found.layers["4"]
    np.testing.assert_allclose(layer.observed.mean_var, mean.var(0, ddof=1), rtol=1e-5)
    np.testing.assert_allclose(layer.observed.std_var, std.var(0, ddof=1), rtol=1e-4)
    expected = [np.corrcoef(mean[:, c], std[:, c])[0, 1] for c in range(48)]
    np.testing.assert_allclose(layer.correlation, expected, atol=1e-4)
    torch.testing.assert_close(layer.mean_p, lilliefors(bank.mean["4"])[1])
    torch.testing.assert_close(layer.std_p, lilliefors(bank.var["4"].sqrt())[1])


def test_cuda_that_has_not_started_starts_with_the_users_seed(monkeypatch):
    """torch keeps the last one for it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model, (x,) = bnuq.convert(mlp()), ROWS.tensors
    torch.manual_seed(7)
    normality(model, num_batches=8)
    options = {"likelihood": "gaussian", "noise_var": 1.0, "num_samples": 2}
    bnuq.fit_batch_size(model, (x, torch.zeros(len(x), 48)), [50, 80], **options)
    assert seeds == [0, 7]  # of the network, and the last one


def test_in_inference_mode():
    model = bnuq.convert(mlp())
    with torch.inference_mode():
        found = normality(model, num_batches=8)
    assert str(found) == str(normality(model, num_batches=8))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(self.norm(x).relu())


def test_each_call_of_a_layer_counts_by_itself():
    found = normality(bnuq.convert(Twice()), num_batches=200)
    assert list(found.layers) == ["norm", "norm#1"]
    assert found.layers["norm"].mean_ratio.median() < 1.3
    assert found.layers["norm#1"].mean_ratio.median() > 15


def test_a_model_without_parameters():
    plain = bnuq.convert(nn.BatchNorm1d(10, affine=False, track_running_stats=False))
    assert normality(plain, num_batches=200).layers[""].mean_ratio.median() < 1.3


def test_is_a_table_when_printed():
    found = normality(bnuq.convert(mlp(16)), num_batches=100)
    lines = repr(found).splitlines()
    assert lines[0].startswith("100 batches of 32 out of 800 rows")
    assert lines[1].index("variance") == lines[2].index("of the mean") - 2
    assert len({len(line) for line in lines[2:]}) == 1
    assert [line.split()[0] for line in lines[3:]] == ["1", "4", "7"]
    for line, layer in zip(lines[3:], found.layers.values(), strict=True):
        pairs = zip(layer.analytic, layer.observed, strict=True)
        ratios = [(a / b).median().item() for a, b in pairs][1::2]
        shares = [(p < 0.05).double().mean().item() for p in (layer.mean_p, layer.std_p)]
        words = [f"{r:.3g}" for r in ratios] + [f"{s:.0%}" for s in shares]
        assert line.split()[1:] == [*words, f"{layer.correlation.abs().median().item():.2f}"]


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_generators_are_left_as_found(fails):
    model = bnuq.convert(mlp(8)).train()
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    if fails:
        model[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            normality(model)
    else:
        first = normality(model, num_batches=8)
        assert torch.equal(
            first.layers["4"].mean_p, normality(model, num_batches=8).layers["4"].mean_p
        )
    assert torch.equal(torch.get_rng_state(), draws) and model[1].training and model[1].bank is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Growing(nn.Module):
    """Calls its norm once more for inputs of more than 32 rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(self.norm(x)) if len(x) > 32 else self.norm(x)


def test_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    normality(bnuq.convert(mlp(8)), num_batches=8)
    assert "statistics_normality: 100%" in capsys.readouterr().err
    normality(bnuq.convert(mlp(8)), num_batches=8, progress=False)
    assert capsys.readouterr().err == ""


CASES = {
    "model": ({"model": mlp()}, ValueError, "model must contain stochastic batch-norm layers"),
    "data": ({"data": 3}, TypeError, "data must be a map-style data set"),
    "small": ({"batch_size": 1}, ValueError, "batch_size must be at least 2, got 1"),
    "large": ({"batch_size": 801}, ValueError, "batch_size must be at most the data set's size 800"),
    "all": ({"batch_size": 800}, ValueError, "batch_size must be less than the data's 800 rows, got 800"),
    "batches": ({"num_batches": 7}, ValueError, "num_batches must be at least 8, got 7"),
    "at a time": ({"rows_at_a_time": 0}, ValueError, "rows_at_a_time must be at least 1"),
    "seed": ({"seed": 2**63}, ValueError, "seed must lie in"),
    "calls": ({"model": bnuq.convert(Growing())}, ValueError, "the same calls for every batch, got an additional"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rejects(case):
    options, error, text = CASES[case]
    with pytest.raises(error, match=f"statistics_normality: .*{text}"):
        normality(**{"model": bnuq.convert(mlp(8)), **options})
