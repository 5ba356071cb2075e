"""The scores against scikit-learn, scipy and values worked out by hand."""

import inspect
import math
import re

import pytest
import torch
from normals import draw
from scipy import optimize, stats
from sklearn import metrics as sklearn_metrics

from bnuq_ext import metrics
from bnuq_ext.metrics.classification import bins_of


def labels(n, k, seed=1):
    return torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))


def test_nll_is_scikit_learns_log_loss():
    probs, y = (3 * draw(200, 10)).softmax(1), labels(200, 10)
    expected = sklearn_metrics.log_loss(y, probs, labels=range(10))
    assert metrics.nll(probs, y).item() == pytest.approx(expected, rel=1e-12)
    assert metrics.nll(probs, y, reduction="none").mean().item() == pytest.approx(
        expected, rel=1e-12
    )


def test_nll_of_pixels():
    probs, y = draw(3, 5, 4, 2).softmax(1), labels(24, 5).view(3, 4, 2)
    flat = probs.permute(0, 2, 3, 1).reshape(-1, 5)
    expected = sklearn_metrics.log_loss(y.flatten(), flat, labels=range(5))
    assert metrics.nll(probs, y).item() == pytest.approx(expected, rel=1e-12)
    assert metrics.nll(probs, y, reduction="none").shape == (3, 4, 2)


def test_nll_of_an_impossible_label_is_infinite():
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() == math.inf


def test_brier_is_scikit_learns():
    probs, y = (3 * draw(200, 10)).softmax(1), labels(200, 10)
    expected = sklearn_metrics.brier_score_loss(y, probs, labels=range(10), scale_by_half=False)
    assert metrics.brier(probs, y).item() == pytest.approx(expected, rel=1e-12)
    rows = metrics.brier(probs, y, reduction="none")
    assert rows.shape == (200,) and rows.mean().item() == pytest.approx(expected, rel=1e-12)
    pixels = metrics.brier(probs.T.view(1, 10, 20, 10), y.view(1, 20, 10), reduction="none")
    torch.testing.assert_close(pixels.flatten(), rows)


def test_brier_of_certainties():
    probs = torch.eye(3)[:2]
    assert metrics.brier(probs, torch.tensor([0, 2]), reduction="none").tolist() == [0, 2]


def test_pll_is_the_log_of_the_mean_probability():
    probs, y = (3 * draw(6, 20, 4)).softmax(2), labels(20, 4)
    expected = probs.numpy()[:, range(20), y].mean(0)
    actual = metrics.categorical_pll(probs, y, reduction="none")
    torch.testing.assert_close(actual, torch.from_numpy(expected).log())
    assert metrics.categorical_pll(probs, y).item() == pytest.approx(actual.mean().item())
    mean = metrics.categorical_pll(probs.mean(0), y, reduction="none")
    torch.testing.assert_close(mean, actual)
    torch.testing.assert_close(mean, -metrics.nll(probs.mean(0), y, reduction="none"))


def test_pll_of_pixels_and_of_an_impossible_label():
    probs, y = draw(6, 3, 5, 4, 2).softmax(2), labels(24, 5).view(3, 4, 2)
    flat = probs.permute(0, 1, 3, 4, 2).reshape(6, 24, 5)
    actual = metrics.categorical_pll(probs, y, reduction="none").flatten()
    torch.testing.assert_close(actual, metrics.categorical_pll(flat, y.flatten(), reduction="none"))
    assert metrics.categorical_pll(torch.eye(2)[None], torch.tensor([1, 1])).item() == -math.inf


def test_accuracy():
    probs, y = draw(200, 4).softmax(1), labels(200, 4)
    expected = sklearn_metrics.accuracy_score(y, probs.argmax(1))
    assert metrics.accuracy(probs, y).item() == pytest.approx(expected, rel=1e-12)
    assert 0 < expected < 1


def test_ece_by_hand():
    # Two bins: (0, 0.5] holds a row of confidence 0.5 that is right,
    # (0.5, 1] holds 0.9 right and 0.8 wrong.
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0], [0.1, 0.8, 0.1]], dtype=torch.float64)
    y = torch.tensor([0, 0, 2])
    expected = 1 / 3 * abs(1 - 0.5) + 2 / 3 * abs(0.5 - 0.85)
    assert metrics.ece(probs, y, num_bins=2).item() == pytest.approx(expected, rel=1e-12)


def test_ece_matches_scipy_bins():
    probs, y = (2 * draw(500, 5)).softmax(1), labels(500, 5)
    confidence, guess = probs.max(1)
    right = (guess == y).double()
    count, edges, _ = stats.binned_statistic(-confidence, confidence, "count", 15, (-1, 0))
    gap = stats.binned_statistic(-confidence, confidence - right, "sum", edges).statistic
    assert count.sum() == 500
    assert metrics.ece(probs, y).item() == pytest.approx(abs(gap).sum() / 500, rel=1e-12)


@pytest.mark.parametrize("num_bins", [1, 15, 25, 29, 100])
def test_an_edge_belongs_to_the_bin_below(num_bins):
    edges = torch.tensor([b / num_bins for b in range(num_bins + 1)], dtype=torch.float64)
    assert bins_of(edges, num_bins).tolist() == [0, *range(num_bins)]
    above = torch.nextafter(edges, torch.tensor(2.0, dtype=torch.float64))
    assert bins_of(above, num_bins).tolist() == [*range(num_bins), num_bins - 1]


def test_gradients_reach_a_probability_of_zero():
    probs = torch.tensor([[0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(metrics.brier(probs, torch.tensor([0])), probs)
    assert grad.tolist() == [[-2.0, 2.0]]


def test_ece_counts_pixels_as_rows():
    probs, y = draw(3, 5, 4, 2).softmax(1), labels(24, 5).view(3, 4, 2)
    flat = probs.movedim(1, -1).flatten(0, -2)
    assert metrics.ece(probs, y).item() == metrics.ece(flat, y.flatten()).item()


def test_entropies_match_scipy():
    probs = (2 * draw(7, 20, 6)).softmax(2)
    mean = probs.mean(0)
    entropy = torch.from_numpy(stats.entropy(mean.numpy(), axis=1))
    expected = torch.from_numpy(stats.entropy(probs.numpy(), axis=2)).mean(0)
    actual = metrics.predictive_entropy(probs, reduction="none")
    torch.testing.assert_close(actual, entropy)
    actual = metrics.mutual_information(probs, reduction="none")
    torch.testing.assert_close(actual, entropy - expected)
    assert metrics.mutual_information(probs).item() == pytest.approx(actual.mean().item())


def test_entropy_and_information_of_opposed_certainties_is_log_two():
    probs = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    assert metrics.predictive_entropy(probs).item() == pytest.approx(math.log(2))
    assert metrics.mutual_information(probs.requires_grad_()).item() == pytest.approx(math.log(2))
    metrics.mutual_information(probs).backward()
    assert probs.grad.isfinite().all() and probs.grad[0, 0, 0] == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("replicas", [1, 3, 64])
def test_equal_replicas_have_exactly_no_information(replicas):
    probs = (5 * draw(1, 50, 10).float()).softmax(2).expand(replicas, -1, -1)
    assert (metrics.mutual_information(probs, reduction="none") == 0).all()


@pytest.mark.parametrize("scale", [30, 300, 1000])  # among those of the last subnormal ones
def test_information_lies_between_zero_and_that_of_opposed_certainties(scale):
    information = metrics.mutual_information(
        (scale * draw(5, 1000, 10)).softmax(2), reduction="none"
    )
    assert -1e-14 < information.min() and information.max() < math.log(5) + 1e-14


def test_auroc_matches_scikit_learn_with_ties():
    inside, outside = (3 * draw(80)).round(), (3 * draw(60, seed=2) + 1).round()
    truth = torch.cat([torch.zeros(80), torch.ones(60)])
    expected = sklearn_metrics.roc_auc_score(truth, torch.cat([inside, outside]))
    assert metrics.auroc(inside, outside).item() == pytest.approx(expected, rel=1e-12)
    assert metrics.auroc(outside, inside).item() == pytest.approx(1 - expected, rel=1e-12)
    counts = [(8 * scores).long() for scores in (inside, outside)]
    assert metrics.auroc(*counts) == metrics.auroc(*[c.double() for c in counts])


def test_auroc_of_nan_or_nothing_is_nan():
    scores = torch.tensor([0.0, 1.0])
    for other in (torch.tensor([0.5, math.nan]), scores[:0]):
        assert metrics.auroc(scores, other).isnan() and metrics.auroc(other, scores).isnan()


def test_nan_stays_in_its_row():
    probs, y = torch.tensor([[math.nan, 0.5], [0.5, 0.5]]), torch.tensor([1, 1])
    for values in (
        metrics.brier(probs, y, reduction="none"),
        metrics.nll(probs, y - 1, reduction="none"),
        metrics.categorical_pll(probs[None], y - 1, reduction="none"),
        metrics.predictive_entropy(probs[None], reduction="none"),
        metrics.mutual_information(probs[None], reduction="none"),
    ):
        assert values.isnan().tolist() == [True, False]
    assert metrics.ece(probs, y).isnan()
    other = torch.tensor([[math.nan, 0.2, 0.8], [0.2, 0.3, 0.5]]), torch.tensor([2, 2])
    assert metrics.nll(*other, reduction="none").isnan().tolist() == [True, False]
    assert metrics.categorical_pll(*other, reduction="none").isnan().tolist() == [True, False]


def test_what_rounding_made_negative_is_zero():
    probs = torch.tensor([[[1 + 1e-7, -1e-7]], [[0.9, 0.1]]])
    assert metrics.predictive_entropy(probs[:1]).item() == pytest.approx(0.0, abs=1e-6)
    expected = metrics.mutual_information(probs.clamp(0, 1)).item()
    assert metrics.mutual_information(probs).item() == pytest.approx(expected, abs=1e-6)
    assert metrics.nll(probs[0], torch.tensor([1])).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint64, torch.int16])
def test_labels_of_every_integer_type(dtype):
    probs, y = torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.tensor([1, 0])
    assert metrics.nll(probs, y.to(dtype)) == metrics.nll(probs, y)


def test_temperature_matches_scipy():
    logits, y = 4 * draw(300, 5), labels(300, 5)
    logits[torch.arange(300), y] += 3

    def score(log_temperature):
        return torch.nn.functional.cross_entropy(logits / math.exp(log_temperature), y).item()

    expected = math.exp(optimize.minimize_scalar(score, (-1, 1), tol=1e-12).x)
    assert 1 < expected < 10
    assert metrics.fit_temperature(logits, y) == pytest.approx(expected, rel=1e-6)


def test_a_row_with_nan_is_neither_right_nor_wrong():
    probs = torch.tensor([[0.2, 0.8], [math.nan, 0.5], [0.6, 0.4]])
    hits = metrics.accuracy(probs, torch.tensor([1, 0, 1]), reduction="none")
    assert hits.isnan().tolist() == [False, True, False] and hits[[0, 2]].tolist() == [1, 0]


@pytest.mark.parametrize("size", [3, 30, 1e3, 1e4])
def test_temperature_of_perfect_logits_is_the_bound_whatever_their_size(size):
    y = torch.arange(4)
    assert metrics.fit_temperature(size * torch.eye(4), y) == pytest.approx(0.01)
    assert metrics.fit_temperature(-size * torch.eye(4), y) == pytest.approx(100)


def test_temperature_where_all_are_as_good_is_1():
    assert (
        metrics.fit_temperature(torch.tensor([[2.0], [0.0]]).expand(2, 3), torch.tensor([0, 2]))
        == 1
    )


def test_temperature_does_not_see_what_all_classes_have():
    logits, y = 4 * draw(300, 5), labels(300, 5)
    logits[torch.arange(300), y] += 3
    expected = metrics.fit_temperature(logits, y)
    assert metrics.fit_temperature(logits + 2.0**30, y) == pytest.approx(expected, rel=1e-6)


def test_temperature_of_perfect_logits_is_the_bound():
    assert metrics.fit_temperature(0.1 * torch.eye(4), torch.arange(4)) == pytest.approx(0.01)
    assert metrics.fit_temperature(torch.eye(4), (torch.arange(4) + 1) % 4) == pytest.approx(100)


@pytest.mark.parametrize("name", [n for n in vars(metrics) if callable(getattr(metrics, n))])
def test_every_score_tells_its_arguments_its_result_and_its_source(name):
    words = getattr(metrics, name).__doc__
    assert "Args:" in words and "Returns:" in words
    for argument in inspect.signature(getattr(metrics, name)).parameters:
        assert re.search(rf"\b{argument}\b.*:", words.split("Args:")[1]), argument
    assert name == "evaluate" or re.search(r"\b(19|20)\d\d\b", words)


PROBS, Y = torch.full((3, 2), 0.5), torch.tensor([0, 1, 1])
REFUSED = [
    (lambda: metrics.nll([0.5], Y), TypeError, "nll: probs must be a tensor, got list"),
    (
        lambda: metrics.nll(PROBS.long(), Y),
        TypeError,
        "nll: probs must be a floating-point tensor, got torch.int64",
    ),
    (lambda: metrics.nll(PROBS[0], Y), ValueError, "nll: probs must have shape (N, K), got [2]"),
    (
        lambda: metrics.nll(PROBS, Y.float()),
        TypeError,
        "nll: y must be a tensor of integer labels, got torch.float32",
    ),
    (
        lambda: metrics.nll(PROBS, Y.cfloat()),
        TypeError,
        "nll: y must be a tensor of integer labels, got torch.complex64",
    ),
    (
        lambda: metrics.accuracy(PROBS, Y[:2]),
        ValueError,
        "accuracy: y must have shape [3], got [2]",
    ),
    (
        lambda: metrics.brier(PROBS, Y[:2]),
        ValueError,
        "brier: y must have shape [3], got [2]",
    ),
    (
        lambda: metrics.categorical_pll(PROBS[None], Y[:2]),
        ValueError,
        "categorical_pll: y must have shape [3], got [2]",
    ),
    (
        lambda: metrics.categorical_pll(PROBS, [0, 1, 1]),
        TypeError,
        "categorical_pll: y must be a tensor of integer labels, got list",
    ),
    (
        lambda: metrics.accuracy(PROBS, Y.numpy()),
        TypeError,
        "accuracy: y must be a tensor of integer labels, got ndarray",
    ),
    (lambda: metrics.ece(PROBS, Y + 1), ValueError, "ece: y must lie in [0, 2), got [1, 2]"),
    (
        lambda: metrics.ece(PROBS, Y * 255),
        ValueError,
        "ece: y must lie in [0, 2) (evaluate leaves its ignore_index out), got [0, 255]",
    ),
    (
        lambda: metrics.nll(PROBS, Y * -100),
        ValueError,
        "nll: y must lie in [0, 2) (evaluate leaves its ignore_index out), got [-100, 0]",
    ),
    (lambda: metrics.ece(PROBS, Y, 0), ValueError, "ece: num_bins must be at least 1, got 0"),
    (
        lambda: metrics.nll(PROBS, Y, reduction="sum"),
        ValueError,
        "nll: reduction must be one of mean, none, got 'sum'",
    ),
    (
        lambda: metrics.mutual_information(PROBS),
        ValueError,
        "mutual_information: probs must have shape (T, N, K), got [3, 2]",
    ),
    (
        lambda: metrics.predictive_entropy(PROBS[None] * 2),
        ValueError,
        "predictive_entropy: probs must have shape (T, N, K, *) and sum to 1 over K, got 2.0",
    ),
    (
        lambda: metrics.auroc(PROBS, PROBS[0]),
        ValueError,
        "auroc: scores_in must have one dimension, got 2",
    ),
    (
        lambda: metrics.ece(PROBS, Y, 15.0),
        TypeError,
        "ece: num_bins must be an integer, got 15.0",
    ),
    (
        lambda: metrics.fit_temperature([0.5], Y),
        TypeError,
        "fit_temperature: logits must be a tensor, got list",
    ),
    *(
        (
            lambda score=score: score(torch.tensor([[0.5, 0.5], [-1.5, 0.5], [2.5, 0.5]]), Y),
            ValueError,
            f"{score.__name__}: probs must lie in [0, 1], got -1.5",
        )
        for score in (metrics.nll, metrics.brier, metrics.ece, metrics.categorical_pll)
    ),
    (
        lambda: metrics.mutual_information(1.5 * PROBS[None] + 0.5),
        ValueError,
        "mutual_information: probs must lie in [0, 1], got 1.25",
    ),
    (
        lambda: metrics.predictive_entropy(-PROBS[None]),
        ValueError,
        "predictive_entropy: probs must lie in [0, 1], got -0.5",
    ),
    *(
        (
            lambda score=score, arguments=arguments: score(PROBS[None][:0], *arguments),
            ValueError,
            f"{score.__name__}: probs must have shape (T, N, K) with T > 0, got [0, 3, 2]",
        )
        for score, arguments in (
            (metrics.predictive_entropy, ()),
            (metrics.mutual_information, ()),
            (metrics.categorical_pll, (Y,)),
        )
    ),
    (
        lambda: metrics.fit_temperature(PROBS[:0], Y[:0]),
        ValueError,
        "fit_temperature: logits must have rows, got [0, 2]",
    ),
    (
        lambda: metrics.fit_temperature(PROBS.log() / torch.tensor([0.0, 1.0]), Y),
        ValueError,
        "fit_temperature: logits must be finite, got 3 values that are not",
    ),
]


@pytest.mark.parametrize("call, error, message", REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_rejects(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_confidence_beyond_1_by_rounding():
    probs = torch.tensor([[1 + 1e-6, -1e-6], [1.005, -0.005]])
    assert metrics.ece(probs, torch.tensor([0, 0])) < 0.01


def test_equal_replicas_have_no_information_whatever_their_number():
    probs = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).expand(3, 2, 3)
    assert (metrics.mutual_information(probs, reduction="none") == 0).all()
