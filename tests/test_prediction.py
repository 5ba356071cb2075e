"""Prediction: information that is exactly zero, and predictions of samples from anywhere."""

import copy
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from predicting import DATA, equal, network, predict

import bnuq_ext as bnuq
from bnuq_ext import reference
from bnuq_ext.ops.checks import acc_dtype
from bnuq_ext.prediction import make_moments


@pytest.mark.filterwarnings("ignore:collect. the batches have 60 rows")
def test_information_is_exactly_zero_where_the_batch_is_the_data_set():
    torch.manual_seed(0)
    model, data = bnuq.convert(network()), DATA[:60]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 60, shuffle=True)
    for source, options in (
        (loader, {}),
        (torch.utils.data.TensorDataset(data), {"batch_size": 60}),
    ):
        bnuq.collect(model, source, 5, progress=False, **options)
        for samples in (3, 64):
            pred = predict(model, num_samples=samples)
            assert (pred.mutual_information == 0).all() and (pred.entropy > 0).all()
            assert pred.variance.max() < 1e-12
    bank = model[1].bank
    for sampler in ("joint", "lognormal", "normal"):
        pred = predict(model, sampler=sampler, batch_size=bank.dataset_size)
        assert (pred.mutual_information == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [1000, 10_000, 100_000])
def test_information_of_equal_samples_is_zero_for_many_classes(classes, dtype):
    g, places = torch.Generator().manual_seed(0), torch.arange(classes)
    drawn = 3 * torch.randn(16, classes, generator=g, dtype=dtype)
    pairs = [(every, value) for every in (2, 3, 50) for value in (0.1, 0.7, 5.0)]
    two_valued = torch.stack(
        [torch.where(places % every == 0, value, 0.0) for every, value in pairs]
    )
    # Of equal numbers many roundings go one way: in float64 by more than is allowed for.
    row = (torch.cat([drawn, two_valued]) if dtype == torch.float32 else drawn)[None]
    moments = make_moments("predict", "categorical")
    for _ in range(8):
        moments.add(row)
    whole = bnuq.Prediction.from_samples(row.expand(8, -1, -1), "categorical")
    for information in (moments.summary()["mutual_information"], whole.mutual_information):
        assert (information == 0).all()


def test_a_little_information_shows_among_many_classes():
    g = torch.Generator().manual_seed(0)
    row = 2 * torch.randn(1, 4, 50_000, generator=g)
    logits = row + 0.01 * torch.randn(32, 4, 50_000, generator=g)
    p = logits.double().softmax(2)
    entropy = torch.special.entr(p.mean(0)).sum(1)
    expected = entropy - torch.special.entr(p).sum(2).mean(0)
    actual = bnuq.Prediction.from_samples(logits, "categorical").mutual_information
    assert expected.max() < 6e-5
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=6e-6)


@pytest.mark.parametrize("count", [8, 32, 100])
def test_a_little_information_is_right_to_the_rounding_of_the_entropies(count):
    """2,000 rows of spreads from 1e-5 to 0.1: off by 2e-6 at the most, and where the bound is below
    that by no more than the bound, which a hundredth of the spread makes 1e4 times smaller."""
    g = torch.Generator().manual_seed(0)
    spread = torch.logspace(-5, -1, 2000)[:, None]
    row = 3 * torch.randn(1, 2000, 10, generator=g)
    logits = row + spread * torch.randn(count, 2000, 10, generator=g)
    mean, variance, entropy, within = reference.predictive_statistics(logits.double())
    actual = bnuq.Prediction.from_samples(logits, "categorical").mutual_information.double()
    bound = (variance / mean).sum(1)
    off = (actual - (entropy - within)).abs()
    assert off.max() < 2e-6 and (actual <= 1.001 * bound + 1e-12).all()
    assert (off <= bound.clamp(min=2e-9)).all()
    assert (actual[bound < 1e-9] == 0).all() and (actual[entropy - within > 2e-6] > 0).all()


def test_information_of_equal_samples_is_zero_and_of_others_never_negative():
    g = torch.Generator().manual_seed(0)
    row = torch.randn(1, 500, 7, generator=g) * 4
    for count in (1, 3, 100):
        equal_samples = bnuq.Prediction.from_samples(row.expand(count, -1, -1), "categorical")
        assert (equal_samples.mutual_information == 0).all()
        assert 0 <= equal_samples.variance.min() <= equal_samples.variance.max() < 1e-14
    for size in (1e-6, 1e-4, 1e-2):
        noisy = row + size * torch.randn(50, 500, 7, generator=g)
        information = bnuq.Prediction.from_samples(noisy, "categorical").mutual_information
        assert (information >= 0).all()
    p = noisy.double().softmax(2)
    expected = reference.predictive_statistics(noisy.double())
    expected = expected[2] - expected[3]
    assert p.shape == (50, 500, 7) and (information > 0).float().mean() > 0.5
    torch.testing.assert_close(information.double(), expected, rtol=0.05, atol=6e-6)


def test_from_samples_is_predict(model):
    for likelihood, noise in (("categorical", None), ("gaussian", 0.25)):
        pred = predict(model, likelihood=likelihood, noise_var=noise, keep_samples=True)
        again = bnuq.Prediction.from_samples(pred.samples, likelihood, noise)
        equal(again, pred)
        assert again.noise_var == noise and again.num_samples == 20
        assert repr(again) == f"Prediction({likelihood}, 20 replicas, mean of shape (9, 5))"


def test_of_one_output_a_row():
    samples = torch.randn(4, 3)
    pred = bnuq.Prediction.from_samples(samples, "gaussian")
    torch.testing.assert_close(pred.mean, samples.mean(0))
    torch.testing.assert_close(pred.variance, samples.var(0, correction=0))


def test_is_equal_to_itself_alone():
    pred, other = (bnuq.Prediction.from_samples(torch.ones(4, 3), "gaussian") for _ in range(2))
    assert pred == pred and pred != other and len({pred, other}) == 2


@pytest.mark.parametrize(
    "samples, likelihood, error, message",
    [
        (
            torch.zeros(0, 3, 2),
            "gaussian",
            ValueError,
            r"samples must have at least 1 replica, got \[0, 3, 2\]",
        ),
        (
            torch.zeros(2, 3).long(),
            "gaussian",
            TypeError,
            "samples must be a floating-point tensor",
        ),
        (
            torch.zeros(4, 3),
            "categorical",
            ValueError,
            r"samples must have shape \(T, N, K, \*\), got \[4, 3\]",
        ),
        (
            torch.zeros(4),
            "gaussian",
            ValueError,
            r"samples must have shape \(T, N, ...\), got \[4\]",
        ),
        (
            torch.zeros(4, 3, 1),
            "categorical",
            ValueError,
            r"samples must have at least 2 classes, got \[4, 3, 1\]",
        ),
        (
            torch.zeros(4, 3, 0),
            "categorical",
            ValueError,
            r"samples must have at least 2 classes, got \[4, 3, 0\]",
        ),
        (
            torch.zeros(4, 3),
            "poisson",
            ValueError,
            "likelihood must be one of categorical, gaussian",
        ),
    ],
)
def test_from_samples_rejects(samples, likelihood, error, message):
    with pytest.raises(error, match=f"Prediction.from_samples: {message}"):
        bnuq.Prediction.from_samples(samples, likelihood)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (2, 1), (2, 3)])
def test_noise_of_every_shape_that_broadcasts(shape):
    samples, noise = torch.randn(4, 2, 3), torch.rand(shape)
    pred = bnuq.Prediction.from_samples(samples, "gaussian", noise)
    expected = samples.double().var(0, correction=0) + noise.double()
    torch.testing.assert_close(pred.total_variance.double(), expected)


@pytest.mark.parametrize("noise", [0, 0.0, torch.zeros(3)], ids=repr)
def test_there_may_be_no_noise(noise):
    pred = bnuq.Prediction.from_samples(torch.randn(4, 2, 3), "gaussian", noise)
    assert torch.equal(pred.total_variance, pred.variance)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (1, 2, 3)])
def test_noise_of_another_shape_is_refused(shape):
    got = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    message = (
        rf"^Prediction.from_samples: noise_var must broadcast to the shape \[2, 3\] .* got {got}$"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.Prediction.from_samples(torch.randn(4, 2, 3), "gaussian", torch.ones(shape))


@pytest.mark.parametrize(
    "noise, text",
    [
        (torch.ones(3) * 1j, "hold real numbers, got torch.complex64 on cpu"),
        (torch.ones(3) > 0, "hold real numbers, got torch.bool on cpu"),
        (torch.ones(3, device="meta"), "hold real numbers, got torch.float32 on meta"),
        (torch.ones(3).to_sparse(), "be a dense tensor, got torch.sparse_coo"),
    ],
)
def test_noise_that_is_no_real_number_is_refused(noise, text):
    with pytest.raises(TypeError, match=f"^Prediction.from_samples: noise_var must {text}$"):
        bnuq.Prediction.from_samples(torch.ones(2, 4, 3), "gaussian", noise_var=noise)


def test_refused_noise_of_many_values_is_shown_by_its_shape():
    requirement = "noise_var must be finite and not negative, got"
    for noise, got in ((torch.full((340, 1), -1.0), "a tensor of shape [340, 1]"), (-1.0, "-1.0")):
        with pytest.raises(ValueError) as caught:
            bnuq.Prediction.from_samples(torch.randn(4, 340, 1), "gaussian", noise)
        assert str(caught.value) == f"Prediction.from_samples: {requirement} {got}"


@pytest.mark.parametrize("noise", [np.float32(0.5), Fraction(1, 2), 0.5], ids=type)
def test_noise_may_be_any_real_number(noise):
    pred = bnuq.Prediction.from_samples(torch.zeros(4, 2, 3), "gaussian", noise)
    torch.testing.assert_close(pred.total_variance, torch.full((2, 3), 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9, 4, 5), (9, 4, 5, 3), (9, 2, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9], ids=str)
def test_running_statistics_match_the_reference(chunks, shape, dtype):
    """Of logits with any number of positions, and of means; chunk by chunk and at once."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 2
    mean, variance, entropy, within = reference.predictive_statistics(outputs.double())
    categorical = {"mean": mean, "variance": variance, "entropy": entropy}
    categorical["mutual_information"] = entropy - within
    wide = outputs.double()
    gaussian = {"mean": wide.mean(0), "variance": wide.var(0, correction=0)}
    off = 1e-5 if dtype == torch.float32 else 1e-13
    for likelihood, expected in (("categorical", categorical), ("gaussian", gaussian)):
        moments = make_moments("test", likelihood)
        for chunk in outputs.split(chunks):
            moments.add(chunk)
        once = bnuq.Prediction.from_samples(outputs, likelihood)
        for name, value in expected.items():
            for actual in (moments.summary()[name], getattr(once, name)):
                assert actual.dtype == dtype
                torch.testing.assert_close(actual.double(), value, rtol=off, atol=off)


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 33]], ids=str)
def test_variance_of_means_far_from_zero(chunks):
    """5e5 standard deviations from zero, where float32 holds a deviation to 3 %,
    but each replica exactly."""
    generator = torch.Generator().manual_seed(0)
    means = 1e5 + 0.2 * torch.randn(40, 50, generator=generator)
    wide = means.double()
    moments = make_moments("test", "gaussian")
    for chunk in means.split(chunks):
        moments.add(chunk)
    found = moments.summary()
    torch.testing.assert_close(found["mean"].double(), wide.mean(0), rtol=1e-7, atol=0)
    expected = wide.var(0, correction=0)
    torch.testing.assert_close(found["variance"].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_means_that_are_not_finite_stay_so_under_any_chunking(chunk, dtype):
    values = [torch.inf, -torch.inf, torch.nan, 0, 1, -2.5]
    samples = torch.tensor(list(itertools.product(values, repeat=3))).T[..., None]  # (3, 216, 1)
    moments = make_moments("test", "gaussian")
    for part in samples.to(dtype).split(chunk):
        moments.add(part)
    samples = samples.to(acc_dtype(dtype))
    expected = {"mean": samples.mean(0), "variance": samples.var(0, correction=0)}
    torch.testing.assert_close(moments.summary(), expected, equal_nan=True)


def test_a_learned_noise_variance_is_kept_as_it_was():
    log_std = torch.zeros(1, requires_grad=True)
    variances = {"parameter": log_std, "function of one": (2 * log_std).exp()}
    samples = torch.randn(5, 4, 3)
    found = {
        name: bnuq.Prediction.from_samples(samples, "gaussian", noise)
        for name, noise in variances.items()
    }
    with torch.no_grad():
        log_std.add_(1)
    for name, before in (("parameter", 0.0), ("function of one", 1.0)):
        assert found[name].noise_var.item() == before
        assert not copy.deepcopy(found[name]).total_variance.requires_grad


def test_samples_with_gradients_make_a_prediction_without():
    for likelihood in ("gaussian", "categorical"):
        pred = bnuq.Prediction.from_samples(torch.randn(3, 4, 5, requires_grad=True), likelihood)
        assert not pred.mean.requires_grad and not pred.variance.requires_grad
