"""`fit_batch_size` against a plain loop over ordinary networks, and what it leaves behind."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import entropy
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

import bnuq_ext as bnuq
from bnuq_ext import StatisticsGaussian
from bnuq_ext.batch_size import log_likelihood

N, T, K = 60, 6, 3
PRIOR = bnuq.implied_prior(1e-3, N)


def network(outputs=K):
    torch.manual_seed(0)
    hidden = (
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
    )
    return nn.Sequential(*hidden, nn.Linear(8, outputs)).eval()


def dataset(rows=N, seed=0, outputs=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    y = torch.randint(K, (rows,), generator=generator)
    return TensorDataset(
        x, y if outputs is None else torch.randn(rows, outputs, generator=generator)
    )


def fit(model=None, candidates=(5, 20, N), **options):
    arguments = {"likelihood": "categorical", "prior": PRIOR, "num_samples": T, "seed": 1}
    model = bnuq.convert(network()) if model is None else model
    data = options.pop("data", dataset())
    return bnuq.fit_batch_size(model, data, candidates, **{**arguments, **options})


def bank_of(net, M, seed=1, outputs=None):
    """The bank that a fit with this seed has at M."""
    model = bnuq.convert(net)
    torch.manual_seed(seed)
    return bnuq.collect(model, dataset(outputs=outputs), T, batch_size=M)


def outputs_of(net, bank, x):
    """(T, rows, outputs) of the ordinary network with the running statistics of each snapshot."""
    net = copy.deepcopy(net)
    outputs = []
    for b in range(len(bank)):
        for name in bank.names:
            layer = net.get_submodule(name)
            layer.running_mean.copy_(bank.mean[name][b])
            layer.running_var.copy_(bank.var[name][b])
        outputs.append(net(x).double())
    return torch.stack(outputs).detach()


@pytest.mark.parametrize("validation", [None, dataset(20, seed=1)], ids=["", "validation"])
def test_is_shown_as_a_table(validation):
    found = fit(validation=validation)
    head, *rows, last = repr(found).splitlines()
    assert len({len(line) for line in (head, *rows)}) == 1
    for M, row in zip((5, 20, N), rows, strict=True):
        shown = dict(zip(head.split(), map(float, row.split()), strict=True))
        assert shown.pop("M") == M and ("nll" in shown) == (validation is not None)
        for name, value in shown.items():
            expected = getattr(found, name)[found.batch_sizes == M].item()
            assert value == pytest.approx(expected, rel=1e-5)
    by_nll = f", by validation NLL {found.best_by_nll}" if validation else ""
    assert last == f"best M by ELBO {found.best_by_elbo}{by_nll}"


def test_matches_a_plain_loop(device):
    net, validation = network(), dataset(20, seed=1)
    found = fit(bnuq.convert(net).to(device), candidates=[5], validation=validation)
    bank = bank_of(net, 5)
    x, y = dataset().tensors
    train = Categorical(logits=outputs_of(net, bank, x)).log_prob(y)
    close = {"rtol": 1e-5, "atol": 1e-6} if device.type == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found.log_likelihood, train.mean(0).sum()[None], **close)
    x, y = validation.tensors
    probs = outputs_of(net, bank, x).softmax(2)
    nll = -probs.mean(0)[torch.arange(20), y].log().mean()
    torch.testing.assert_close(found.nll, nll[None], **close)
    information = entropy(probs.mean(0), axis=1) - entropy(probs, axis=2).mean(0)
    torch.testing.assert_close(found.mutual_information.item(), information.mean(), **close)
    variance = probs.var(0, correction=0).mean()
    torch.testing.assert_close(found.epistemic_variance, variance[None], **close)


def test_divergence_is_that_of_the_snapshots():
    net = network()
    prior = {
        name: StatisticsGaussian(torch.full((8,), m), torch.full((8,), 2.0), 0.3, 0.7)
        for name, m in (("1", 0.1), ("4", -0.2))
    }
    found, bank, expected = fit(bnuq.convert(net), candidates=[5], prior=prior), bank_of(net, 5), 0
    for name, p in prior.items():
        for values, m, v in ((bank.mean[name], p.mean, 2.0), (bank.var[name].sqrt(), 0.3, 0.7)):
            q = Normal(values.double().mean(0), values.double().std(0))
            m = torch.as_tensor(m).double()
            expected += kl_divergence(q, Normal(m, v**0.5)).sum()
    torch.testing.assert_close(found.kl, expected[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(found.elbo, found.log_likelihood - found.kl)


def test_few_batches_make_the_divergence_too_large_by_a_constant():
    """2,000 means and deviations: a standard error of 0.014 nats at 3 batches, 0.002 at 64;
    bias 0.29, 0.008."""
    torch.manual_seed(0)
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(1000), nn.Linear(1000, 2)).eval())
    data = TensorDataset(torch.randn(8000, 1000), torch.zeros(8000, dtype=torch.int64))
    options = {"data": data, "candidates": [16, 32, 64], "num_rows": 1}
    few, many = (fit(model, num_samples=count, **options).kl / 2000 for count in (3, 64))
    bias = lambda count: (math.log((count - 1) / 2) - digamma((count - 1) / 2)) / 2  # noqa: E731
    torch.testing.assert_close(
        few - many, torch.full((3,), bias(3) - bias(64)).double(), rtol=0, atol=0.06
    )
    torch.testing.assert_close(
        many.diff(), torch.full((2,), math.log(2) / 2).double(), rtol=0, atol=0.02
    )


def test_tensors_and_loaders_stand_for_data_sets():
    data, wanted = dataset(), fit(candidates=[5], validation=dataset(seed=1))
    for given in (data.tensors, DataLoader(data, batch_size=7)):
        found = fit(candidates=[5], data=given, validation=dataset(seed=1).tensors)
        assert torch.equal(found.elbo, wanted.elbo) and torch.equal(found.nll, wanted.nll)


def test_without_a_prior_the_smallest_batch_is_it():
    net = network()
    found, expected = fit(bnuq.convert(net), candidates=[6, 5], prior=None), 0
    for name in ("1", "4"):
        banks = bank_of(net, 6), bank_of(net, 5)
        for values in ([b.mean[name] for b in banks], [b.var[name].sqrt() for b in banks]):
            q, p = (Normal(v.double().mean(0), v.double().std(0)) for v in values)
            expected += kl_divergence(q, p).sum()
    assert abs(found.kl[0]) < 1e-12
    torch.testing.assert_close(found.kl[1], expected, rtol=1e-6, atol=0)


def test_gaussian_likelihood_matches_a_plain_loop():
    net, data = network(outputs=2), dataset(outputs=2)
    options = {"likelihood": "gaussian", "noise_var": 0.3, "data": data, "validation": data}
    found = fit(bnuq.convert(net), candidates=[5], **options)
    x, y = data.tensors
    outputs = outputs_of(net, bank_of(net, 5, outputs=2), x)
    log_p = Normal(outputs, 0.3**0.5).log_prob(y.double()).sum(2)
    torch.testing.assert_close(found.log_likelihood, log_p.mean(0).sum()[None], rtol=1e-5, atol=0)
    nll = -(log_p.exp().mean(0).log()).mean()
    torch.testing.assert_close(found.nll, nll[None], rtol=1e-5, atol=0)
    variance = outputs.var(0, correction=0).mean()
    torch.testing.assert_close(found.epistemic_variance, variance[None], rtol=1e-4, atol=0)
    assert found.mutual_information is None


def test_pixels_count_one_by_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, K, 1)).eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, 3, 2, generator=generator)
    y = torch.randint(K, (N, 3, 2), generator=generator)
    found = fit(bnuq.convert(net), [5], data=(x, y), validation=(x[:20], y[:20]))
    model = bnuq.convert(net)
    torch.manual_seed(1)
    outputs = outputs_of(net, bnuq.collect(model, TensorDataset(x), T, batch_size=5), x).movedim(
        2, -1
    )
    log_p = Categorical(logits=outputs).log_prob(y)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.log_likelihood, log_p.mean(0).sum()[None], **close)
    probs = outputs[:, :20].softmax(-1)
    nll = -probs.mean(0).gather(-1, y[:20, ..., None]).log().mean()
    torch.testing.assert_close(found.nll, nll[None], **close)
    information = entropy(probs.mean(0), axis=-1) - entropy(probs, axis=-1).mean(0)
    torch.testing.assert_close(found.mutual_information.item(), information.mean(), **close)
    variance = probs.var(0, correction=0).mean()
    torch.testing.assert_close(found.epistemic_variance, variance[None], **close)


def test_one_output_may_have_flat_targets_and_the_noise_be_any_number():
    data = dataset(outputs=1)
    options = {"candidates": [5], "likelihood": "gaussian", "noise_var": 0.25}
    expected = fit(bnuq.convert(network(outputs=1)), data=data, **options)
    x, y = data.tensors
    options["data"] = TensorDataset(x, y[:, 0])
    for noise in (torch.tensor([0.25]), np.float32(0.25), Fraction(1, 4)):
        found = fit(bnuq.convert(network(outputs=1)), **{**options, "noise_var": noise})
        assert torch.equal(found.log_likelihood, expected.log_likelihood)


def test_no_uncertainty_and_no_elbo_where_the_batch_is_the_data():
    found = fit(candidates=[N, 4, 30], validation=dataset(20, seed=1))
    assert found.batch_sizes.tolist() == [4, 30, N]
    information, variance = found.mutual_information, found.epistemic_variance
    assert information[2] == 0 and variance[2] == 0
    assert information[0] > 3 * information[1] > 0 and variance[0] > 3 * variance[1] > 0
    assert (
        found.kl[2] == math.inf
        and found.elbo[2] == -math.inf
        and found.log_likelihood[2].isfinite()
    )
    assert found.kl[0] < found.kl[1] < math.inf


def test_best_sizes():
    curves = torch.tensor([[1.0, 5.0, 4.0], [0.0, 1.0, math.inf], [0.3, 0.4, 0.2]]).double()
    none = torch.zeros(3).double()
    found = bnuq.BatchSizeFit(torch.tensor([4, 8, 16]), *curves, none, none, 0)
    assert (found.best_by_elbo, found.best_by_nll) == (8, 16)
    assert fit(candidates=[5]).best_by_nll is None


def test_same_seed_same_result_whatever_the_other_candidates_are():
    options = {"validation": dataset(20, seed=1)}
    first, second = fit(**options), fit(candidates=[20], **options)
    torch.rand(3)
    assert torch.equal(first.elbo, fit(**options).elbo)
    for name in ("log_likelihood", "kl", "nll", "mutual_information", "epistemic_variance"):
        assert torch.equal(getattr(first, name)[1:2], getattr(second, name))
    assert not torch.equal(first.kl, fit(seed=2, **options).kl)


def test_rows_of_the_data_are_drawn_and_scaled_up():
    found = fit(num_rows=N)
    assert torch.equal(found.log_likelihood, fit().log_likelihood)
    some = torch.stack([fit(num_rows=15, seed=s).log_likelihood[2] for s in range(40)])
    # 40 means of 15 of 60 rows, without replacement: 4 standard errors.
    error = (some.std() / 40**0.5).item()
    assert abs(some.mean() - found.log_likelihood[2]) < 4 * error


def test_chunks_do_not_matter_and_other_data_sets_do():
    pairs = [(x, y) for x, y in zip(*dataset().tensors, strict=True)]
    dicts = [{"x": x, "y": y} for x, y in pairs]
    expected = fit()
    for other in (fit(rows_at_a_time=7), fit(data=pairs), fit(data=dicts)):
        torch.testing.assert_close(other.elbo, expected.elbo, rtol=1e-5, atol=1e-4)


def test_a_dead_channel_is_left_out():
    net = network()
    with torch.no_grad():
        net[0].weight[3] = 0.0
    found = fit(bnuq.convert(net))
    assert found.left_out == 1 and found.kl[:2].isfinite().all()
    assert fit().left_out == 0


def test_a_channel_counts_if_it_varies_in_some_batch_of_every_size():
    """Of 60 rows one, or six, are not 0 in the first channel: with M = 2 in none, or some,
    of 6 batches."""
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, K)).eval())
    for rows, left_out in ((1, 1), (6, 0)):
        x, y = dataset().tensors
        data = TensorDataset(
            x * torch.cat([(torch.arange(N) < rows).float()[:, None], torch.ones(N, 3)], 1), y
        )
        torch.manual_seed(1)
        varies = bnuq.collect(model, data, T, batch_size=2).var["0"][:, 0] > 0
        assert varies.any() != bool(left_out) and not varies.all()
        found = fit(model, candidates=[2, N], data=data)
        assert found.left_out == left_out and found.kl[0].isfinite()


class Failing(TensorDataset):
    def __getitems__(self, rows):
        if len(rows) == 20:
            raise OSError("gone")
        return [self[row] for row in rows]


@pytest.mark.parametrize("with_bank", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_model_and_generators_are_left_as_found(with_bank, fails):
    model = bnuq.convert(network()).train()
    if with_bank:
        bnuq.collect(model, dataset(), 3, batch_size=4, progress=False)
    before = [dict(vars(m)) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    draws = torch.get_rng_state()
    if fails:
        with pytest.raises(OSError, match="gone"):
            fit(model, data=Failing(*dataset().tensors))
    else:
        fit(model)
    assert torch.equal(torch.get_rng_state(), draws)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys() and module.training
        assert vars(module).get("bank") is attributes.get("bank")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_without_a_seed_torchs_generator_decides():
    torch.manual_seed(3)
    first, after = fit(seed=None), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first.kl, fit(seed=None).kl) and torch.equal(after, torch.rand(1))


def test_dense_targets():
    samples, y = torch.randn(2, 3, K, 4, 5).double(), torch.randint(K, (3, 4, 5))
    actual = log_likelihood(samples, y, "categorical", None)
    expected = Categorical(logits=samples.movedim(2, -1)).log_prob(y)
    torch.testing.assert_close(actual, expected)


def test_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fit(candidates=[5, 20])
    assert "fit_batch_size: 100%" in capsys.readouterr().err
    fit(candidates=[5], progress=False)
    assert capsys.readouterr().err == ""


CASES = {
    "model": ({"model": network()}, ValueError, "model must contain stochastic batch-norm layers"),
    "data": ({"data": 3}, TypeError, "data must be a map-style data set, got int"),
    "arrays": (
        {"data": (np.zeros((60, 3)), np.zeros(60))},
        TypeError,
        r"data must hold tensors \(torch.from_numpy makes them\), got NumPy arrays",
    ),
    "no data": ({"data": []}, ValueError, "data must have rows, got 0"),
    "validation": ({"validation": 3}, TypeError, "validation must be a map-style data set"),
    "no sizes": ({"candidates": []}, ValueError, "candidates must be at least 1 batch size"),
    "twice": ({"candidates": [4, 4]}, ValueError, r"each once, got \[4, 4\]"),
    "a number": ({"candidates": 4}, TypeError, "candidates must be a list of batch sizes, got int"),
    "small": ({"candidates": [1]}, ValueError, "candidates must be at least 2, got 1"),
    "float": ({"candidates": [2.5]}, TypeError, "candidates must be an integer"),
    "large": ({"candidates": [N + 1]}, ValueError, "candidates must be at most the data's 60 rows, got 61"),
    "samples": ({"num_samples": 1}, ValueError, "num_samples must be at least 2"),
    "at a time": ({"rows_at_a_time": 0}, ValueError, "rows_at_a_time must be at least 1"),
    "likelihood": ({"likelihood": "poisson"}, ValueError, "likelihood must be one of"),
    "noise": ({"noise_var": 1.0}, ValueError, "noise_var must be None"),
    "noises": (
        {"likelihood": "gaussian", "noise_var": torch.ones(2)},
        ValueError,
        r"noise_var must be a positive number .* got a tensor of shape \[2\]",
    ),
    "no noise": ({"likelihood": "gaussian"}, ValueError, "noise_var must be a positive number .* got None"),
    "prior": ({"prior": 1.0}, TypeError, "prior must be a StatisticsGaussian"),
    "lengths": (
        {"data": (torch.rand(3, 4), torch.rand(2))}, ValueError, r"data must have as many rows in each tensor, got \[\[3, 4\], \[2\]\]"
    ),
    "no prior": (
        {"prior": None, "candidates": [N]}, ValueError, "prior must be given without a batch size below N = 60"
    ),
    "prior shape": (
        {"prior": PRIOR._replace(mean=torch.zeros(4))}, ValueError, r"prior.mean must broadcast to \[8\], got \[4\]"
    ),
    "prior names": ({"prior": {"9": PRIOR}}, ValueError, r"names of the layers' calls \['1', '4'\]"),
    "rows": ({"num_rows": N + 1}, ValueError, "num_rows must be at most the data's 60 rows"),
    "seed": ({"seed": 2**63}, ValueError, "seed must lie in"),
    "targets": ({"data": TensorDataset(torch.rand(N, 4))}, ValueError, r"data must be \(x, y\) or a data set with targets, got inputs alone"),
    "no targets": ({"data": torch.rand(N, 4)}, ValueError, r"data must be \(x, y\) or a data set with targets, got inputs alone"),
    "validation targets": ({"validation": torch.rand(N, 4)}, ValueError, r"validation must be \(x, y\) or a data set with targets"),
    "targets of nan": (
        {"data": (torch.rand(N, 4), torch.zeros(N, K).index_fill(0, torch.tensor(2), math.nan)), "likelihood": "gaussian", "noise_var": 1.0},
        ValueError, "targets must be finite, got 3 values that are not",
    ),
    "targets type": ({"data": (torch.rand(N, 4), torch.rand(N))}, TypeError, "y must be a tensor of integer labels, got torch.float32"),
    "targets range": ({"data": (torch.rand(N, 4), torch.full((N,), 9))}, ValueError, r"y must lie in \[0, 3\), got \[9, 9\]"),
    "targets shape": ({"data": dataset(outputs=1)}, ValueError, r"shape \[60\], got \[60, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rejects(case):
    options, error, text = CASES[case]
    with pytest.raises(error, match=text):
        fit(**options)
