"""evaluate: the scores of a prediction are those of its parts."""

import math

import pytest
import torch
from normals import draw

from bnuq_ext import Prediction, metrics


def approx(expected):
    return pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-9)


def test_a_label_whose_probability_is_lost_has_its_nll_where_replicas_were_kept():
    """In float32 softmax gives it 0."""
    logits = torch.tensor([[0.0, 120.0], [3.0, 0.0]]).expand(4, 2, 2)
    pred, y = Prediction.from_samples(logits, "categorical"), torch.tensor([0, 0])
    expected = torch.nn.functional.cross_entropy(logits[0].double(), y).item()
    assert metrics.nll(pred.mean, y).isinf()
    assert metrics.evaluate(pred, y)["nll"] == pytest.approx(expected, rel=1e-12)
    pred.samples = None
    assert metrics.evaluate(pred, y)["nll"] == float("inf")


@pytest.mark.parametrize("place", [(), (4, 2)], ids=["rows", "pixels"])
def test_categorical(place):
    logits, y = 2 * draw(5, 20, 3, *place), torch.arange(20) % 3
    y = y.view(20, *[1 for _ in place]).expand(20, *place)
    probs = logits.softmax(2)
    mean = probs.mean(0)
    actual = metrics.evaluate(Prediction.from_samples(logits, "categorical"), y)
    assert list(actual) == ["accuracy", "nll", "brier", "ece", "entropy", "mutual_information"]
    assert actual == approx(
        {
            "accuracy": (mean.argmax(1) == y).double().mean(),
            "nll": metrics.nll(mean, y),
            "brier": metrics.brier(mean, y),
            "ece": metrics.ece(mean, y),
            "entropy": metrics.predictive_entropy(probs),
            "mutual_information": metrics.mutual_information(probs),
        }
    )


NOISES = [0.3, torch.tensor([0.3, 0.2])]


@pytest.mark.parametrize("noise_var", NOISES, ids=["number", "tensor"])
def test_gaussian_with_noise(noise_var):
    samples, y = draw(6, 30, 2), draw(30, 2, seed=1)
    mean, std = samples.mean(0), (samples.var(0, correction=0) + noise_var).sqrt()
    actual = metrics.evaluate(Prediction.from_samples(samples, "gaussian", noise_var), y)
    expected = {
        "rmse": metrics.rmse(mean, y),
        "crps": metrics.gaussian_crps(mean, std, y),
        "nll": metrics.gaussian_nll(mean, std, y),
        "pll": metrics.gaussian_pll(samples, y, noise_var),
    }
    assert actual == approx(expected)
    assert list(actual) == list(expected)


def test_gaussian_without_samples_has_no_pll():
    samples, y = draw(6, 30), draw(30, seed=1)
    pred = Prediction.from_samples(samples, "gaussian", 0.3)
    every = metrics.evaluate(pred, y)
    pred.samples = None
    some = metrics.evaluate(pred, y)
    assert some == {name: every[name] for name in ("rmse", "crps", "nll")}


@pytest.mark.parametrize("noise_var", [None, 0.0, torch.tensor([0.0] + 29 * [1.0])], ids=str)
def test_gaussian_without_noise_has_no_density(noise_var):
    samples, y = draw(6, 30), draw(30, seed=1)
    pred = Prediction.from_samples(samples, "gaussian", noise_var)
    actual = metrics.evaluate(pred, y)
    std = pred.total_variance.sqrt()
    assert actual == approx(
        {
            "rmse": metrics.rmse(pred.mean, y),
            "crps": metrics.gaussian_crps(pred.mean, std, y),
        }
    )


def test_one_replica_without_noise_scores_its_absolute_error():
    samples, y = draw(1, 30), draw(30, seed=1)
    actual = metrics.evaluate(Prediction.from_samples(samples, "gaussian"), y)
    assert actual["crps"] == pytest.approx((samples[0] - y).abs().mean().item(), rel=1e-12)


def test_targets_of_one_output_may_be_flat():
    samples, y = draw(6, 30, 1), draw(30, seed=1)
    for noise_var in (torch.tensor(0.3), torch.full((30, 1), 0.3)):
        pred = Prediction.from_samples(samples, "gaussian", noise_var)
        flat = Prediction.from_samples(samples[..., 0], "gaussian", torch.tensor(0.3))
        assert metrics.evaluate(pred, y) == metrics.evaluate(pred, y[:, None])
        assert metrics.evaluate(pred, y) == pytest.approx(metrics.evaluate(flat, y), rel=1e-12)


def test_outputs_of_more_dimensions_are_outputs():
    samples, y = draw(4, 5, 2, 3), draw(5, 2, 3, seed=1)
    actual = metrics.evaluate(Prediction.from_samples(samples, "gaussian", 0.2), y)
    flat = Prediction.from_samples(samples.flatten(2), "gaussian", 0.2)
    assert actual == pytest.approx(metrics.evaluate(flat, y.flatten(1)), rel=1e-9)


def test_rejects():
    gaussian = Prediction.from_samples(draw(2, 3, 1), "gaussian", 1.0)
    categorical = Prediction.from_samples(draw(2, 3, 4), "categorical")
    for call, error, message in (
        (
            lambda: metrics.evaluate(gaussian.mean, gaussian.mean),
            TypeError,
            "evaluate: pred must be a Prediction, got Tensor",
        ),
        (
            lambda: metrics.evaluate(categorical, torch.tensor([0, 4, 1])),
            ValueError,
            "evaluate: y must lie in [0, 4), got [0, 4]",
        ),
        (
            lambda: metrics.evaluate(gaussian, [0.0]),
            TypeError,
            "evaluate: y must be a tensor, got list",
        ),
        (
            lambda: metrics.evaluate(gaussian, torch.zeros(1, 3)),
            ValueError,
            "evaluate: y must have shape [3, 1], got [1, 3]",
        ),
        (
            lambda: metrics.evaluate(gaussian, torch.zeros(3, 1, dtype=torch.bool)),
            TypeError,
            "evaluate: y must be a floating-point tensor, got torch.bool",
        ),
        (
            lambda: metrics.evaluate(categorical, torch.zeros(3)),
            TypeError,
            "evaluate: y must be a tensor of integer labels, got torch.float32",
        ),
    ):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message


REPLICAS = (
    metrics.predictive_entropy,
    metrics.mutual_information,
    lambda probs: metrics.categorical_pll(probs, LABELS),
)
ROWS = [
    lambda probs, score=score: score(probs, LABELS)
    for score in (metrics.nll, metrics.ece, metrics.brier, metrics.categorical_pll)
]
LABELS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize("sums", [0.5, 0.98, 1.02])
def test_probabilities_that_do_not_sum_to_one_are_refused(sums):
    """Those of independent classes, say."""
    for scores, shape, form in ((ROWS, (3, 2), "N, K"), (REPLICAS, (2, 3, 2), "T, N, K")):
        probs = torch.full(shape, 0.5, dtype=torch.float64)
        probs[-1] *= sums
        for score in scores:
            with pytest.raises(ValueError) as caught:
                score(probs)
            op, message = str(caught.value).split(": ")
            requirement, got = message.split(", got ")
            assert requirement == f"probs must have shape ({form}, *) and sum to 1 over K"
            assert float(got) == pytest.approx(sums)


def test_probabilities_rounded_to_16_bits_sum_to_one_well_enough():
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16):
        probs = logits.softmax(1).to(dtype)
        for score in ROWS:
            assert score(probs).isfinite()


@pytest.mark.parametrize("score", [metrics.nll, metrics.accuracy, metrics.ece, metrics.brier])
def test_no_classes_are_refused(score):
    for shape in ((0, 0), (3, 0), (3, 0, 4)):
        with pytest.raises(ValueError) as caught:
            score(torch.zeros(shape), torch.zeros(shape[:1] + shape[2:], dtype=torch.long))
        requirement = f"probs must have shape (N, K) with K > 0, got {list(shape)}"
        assert str(caught.value) == f"{score.__name__}: {requirement}"
    assert score(torch.zeros(3, 2, 0), torch.zeros(3, 0, dtype=torch.long)).isnan()  # no pixels


@pytest.mark.parametrize("ignored", [255, -100, 1])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("place", [(), (4, 2)], ids=["rows", "pixels"])
def test_ignored_labels_are_left_out(place, kept, ignored):
    logits = 2 * draw(5, 20, 3, *place)
    y = torch.arange(20 * len(torch.ones(place).flatten())).view(20, *place) % 3
    y[3:9] = ignored
    pred = Prediction.from_samples(logits, "categorical")
    flat = logits.movedim(2, -1)[:, y != ignored]
    expected = Prediction.from_samples(flat, "categorical")
    if not kept:
        pred.samples = expected.samples = None
    before = y.clone()
    found = metrics.evaluate(pred, y, ignore_index=ignored)
    assert found == pytest.approx(metrics.evaluate(expected, y[y != ignored]), rel=1e-6)
    assert torch.equal(y, before) and pred.mean.shape == logits.shape[1:]
    everything = metrics.evaluate(pred, y.clamp(0, 2), ignore_index=77)
    assert everything == metrics.evaluate(pred, y.clamp(0, 2))


@pytest.mark.parametrize(
    ("dtype", "ignored"), [(torch.uint8, -100), (torch.uint8, 412), (torch.int8, 355)]
)
def test_an_ignored_label_is_no_label_of_a_narrow_type(dtype, ignored):
    pred, y = Prediction.from_samples(draw(5, 4, 200), "categorical"), torch.tensor([99, 1, 0, 2])
    if dtype is torch.uint8:
        y[0] = 156  # -100 or 412 in eight bits
    narrow = y.to(dtype)
    assert metrics.evaluate(pred, narrow, ignore_index=ignored) == metrics.evaluate(pred, y)


def test_nothing_but_ignored_labels_has_scores_of_nan():
    pred = Prediction.from_samples(draw(5, 4, 3), "categorical")
    found = metrics.evaluate(pred, torch.full((4,), 255), ignore_index=255)
    assert len(found) == 6 and all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize(
    ("likelihood", "y", "index", "error", "text"),
    [
        ("categorical", torch.zeros(4).long(), 1.5, TypeError, "ignore_index must be an integer, got 1.5"),
        ("categorical", torch.zeros(4).long(), 2**63, ValueError, r"ignore_index must lie in \[-2\^63, 2\^63\), got 9223372036854775808"),
        ("gaussian", torch.zeros(4, 3), 0, ValueError, 'ignore_index must be None with likelihood "gaussian", got 0'),
        ("categorical", torch.zeros(3).long(), 255, ValueError, r"y must have shape \[4\], got \[3\]"),
        ("categorical", torch.full((4,), 7), 255, ValueError, r"y must lie in \[0, 3\), got \[7, 7\]"),
        ("categorical", torch.full((4,), 255.0), 1, TypeError, "y must be a tensor of integer labels"),
    ],
)  # fmt: skip
def test_ignored_labels_are_refused(likelihood, y, index, error, text):
    pred = Prediction.from_samples(draw(5, 4, 3), likelihood)
    with pytest.raises(error, match=f"^evaluate: {text}"):
        metrics.evaluate(pred, y, ignore_index=index)
