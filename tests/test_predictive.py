"""predictive_statistics and predictive_accumulate_ against the float64 reference."""

import math

import pytest
import torch
from conftest import NANS
from hypothesis import given, settings
from hypothesis import strategies as st

from bnuq_ext import ops, reference

SHAPES = [
    *[(1, 1, 2), (5, 3, 10), (20, 33, 7), (4, 2, 5, 6), (3, 2, 3, 4, 9)],
    *[(2, 1, 1000), (3, 5, 255), (3, 5, 256), (3, 5, 257), (3, 2, 300, 2)],
]
FIELDS = ("mean", "variance", "entropy", "expected_entropy")


def make(shape, device="cpu", dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.to(device, dtype)


def expect(logits):
    return reference.predictive_statistics(logits.double().cpu())


def compare(actual, expected, tolerance=None):
    tolerance = tolerance or (1e-12 if actual[0].dtype == torch.float64 else 3e-6)
    for name, a, e in zip(FIELDS, actual, expected, strict=True):
        bound = tolerance * (1 if name in ("mean", "variance") else 5)  # entropies reach log K
        torch.testing.assert_close(
            a.detach().double().cpu(), e.detach(), rtol=0, atol=bound, msg=None
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device, dtype):
    logits = make(shape, device, dtype)
    statistics = ops.predictive_statistics(logits)
    compare(statistics, expect(logits))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(value.dtype == acc and value.is_contiguous() for value in statistics)
    assert statistics.mean.shape == statistics.variance.shape == shape[1:]
    assert statistics.entropy.shape == statistics.expected_entropy.shape == shape[1:2] + shape[3:]


@settings(max_examples=200)
@given(
    shape=st.tuples(
        st.integers(1, 6), st.integers(0, 40), st.integers(1, 12),
        st.integers(0, 5), st.integers(0, 5),
    ),
    dims=st.integers(3, 5),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)  # fmt: skip
def test_any_shape(shape, dims, scale):
    logits = make(shape[:dims], dtype=torch.float32, scale=scale)
    statistics = ops.predictive_statistics(logits)
    compare(statistics, expect(logits), 1e-5)
    assert (statistics.variance >= 0).all()


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [1, 7, 4], [5, 7]], ids=str)
@pytest.mark.parametrize("shape", [(12, 37, 10), (12, 3, 5, 9), (12, 3, 301)], ids=str)
def test_chunks_give_the_same_bits(chunks, shape, device, dtype):
    logits = make(shape, device, dtype)
    whole = ops.predictive_statistics(logits)
    mean, m2 = torch.zeros_like(whole.mean), torch.zeros_like(whole.mean)
    expected_entropy, count = torch.zeros_like(whole.entropy), 0
    for chunk in logits.split(chunks):
        ops.predictive_accumulate_(mean, m2, expected_entropy, chunk, count)
        count += len(chunk)
    assert torch.equal(mean, whole.mean)
    assert torch.equal(m2 / m2.new_full((), count), whole.variance)
    assert torch.equal(expected_entropy, whole.expected_entropy)


@pytest.mark.parametrize("classes", [7, 301])
def test_rows_do_not_depend_on_their_neighbours(classes, device):
    logits = make((5, 40, classes), device, torch.float32)
    whole = ops.predictive_statistics(logits)
    for n in (0, 15, 39):
        alone = ops.predictive_statistics(logits[:, n : n + 1].contiguous())
        for a, w in zip(alone, whole, strict=True):
            assert torch.equal(a[0], w[n])


@pytest.mark.parametrize("classes", [10, 301])
def test_equal_replicas_have_no_spread(classes, device, dtype):
    logits = make((1, 9, classes), device, dtype).expand(8, 9, classes)
    statistics = ops.predictive_statistics(logits)
    assert not statistics.variance.any()
    # H[mean] and mean H are computed in different ways, so they differ by rounding.
    mutual_information = statistics.entropy - statistics.expected_entropy
    assert mutual_information.abs().max() < (1e-12 if dtype == torch.float64 else 3e-6)
    # And no more so with many.
    many = ops.predictive_statistics(logits[:1].expand(3000, 9, classes))
    for actual, expected in zip(many, statistics, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", [(4, 32, 1000), (4, 32, 3001), (4, 16, 100_000), (4, 3, 900, 7)])
def test_of_many_classes(shape, device):
    """Sums of 100,000 numbers one after another in float32 would be off by 1e-4."""
    logits = make(shape, device, torch.float32)
    statistics, expected = ops.predictive_statistics(logits), expect(logits)
    for actual, exact in zip(statistics[2:], expected[2:], strict=True):
        torch.testing.assert_close(actual.double().cpu(), exact, rtol=0, atol=3e-6)
    torch.testing.assert_close(statistics.mean.double().cpu(), expected[0], rtol=1e-6, atol=1e-9)


def test_gradient_of_many_classes(device):
    logits = make((2, 1, 100_000), device, torch.float32).requires_grad_()
    exact = logits.detach().double().cpu().requires_grad_()
    grads = []
    for statistics, leaf in ((ops.predictive_statistics(logits), logits), (expect(exact), exact)):
        grads += torch.autograd.grad(statistics[2].sum() + 2 * statistics[3].sum(), leaf)
    off = (grads[0].double().cpu() - grads[1]).abs().max() / grads[1].abs().max()
    assert off < 1e-5


def test_known_values(device, dtype):
    """Two replicas, each certain, of different classes: mean 1/2, MI log 2."""
    logits = torch.tensor([[[0.0, -1e4, -math.inf]], [[-1e4, 0.0, -math.inf]]])
    logits = logits.to(device, dtype)
    s = ops.predictive_statistics(logits)
    assert s.mean[0].tolist() == [0.5, 0.5, 0.0]
    assert s.variance[0].tolist() == [0.25, 0.25, 0.0]
    assert s.entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert s.expected_entropy.item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, *NANS], ids=str)
def test_non_finite_logits_stay_visible(bad, device, dtype):
    logits = make((3, 20, 4), device, dtype)
    logits[1, 5, 2] = torch.as_tensor(bad).to(device)
    statistics = ops.predictive_statistics(logits)
    for value in statistics:
        assert torch.isnan(value[5]).all()
        assert torch.isfinite(value[[0, 4, 6, 19]]).all()


@pytest.mark.parametrize("level", [-1e30, 0.0, 1e30, 3e38])
def test_level_of_logits_does_not_matter(level, device):
    statistics = ops.predictive_statistics(torch.full((2, 3, 4), level, device=device))
    assert (statistics.mean == 0.25).all() and (statistics.variance == 0).all()
    assert (statistics.entropy - math.log(4)).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (2, 3, 4, 0)], ids=str)
def test_empty(shape, device):
    logits = make(shape, device).requires_grad_()
    statistics = ops.predictive_statistics(logits)
    assert statistics.mean.shape == shape[1:] and not statistics.entropy.any()
    sum(value.sum() for value in statistics).backward()
    assert logits.grad.shape == shape


def test_views_and_inputs(device, dtype):
    logits = make((5, 6, 7), device, dtype)
    view = logits.movedim(0, 2).contiguous().movedim(2, 0)
    copy = view.clone()
    for a, e in zip(
        ops.predictive_statistics(view), ops.predictive_statistics(logits), strict=True
    ):
        assert torch.equal(a, e)
    assert torch.equal(view, copy) and view._version == 0


def test_number_of_threads_does_not_matter(set_threads):
    logits = make((7, 500, 10), dtype=torch.float32)
    expected = ops.predictive_statistics(logits)
    set_threads(16)
    for a, e in zip(ops.predictive_statistics(logits), expected, strict=True):
        assert torch.equal(a, e)


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 3, 3, 2), (1, 1, 5)], ids=str)
def test_gradcheck(shape, device):
    logits = make(shape, device, scale=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tuple(ops.predictive_statistics(x)), logits)


@pytest.mark.parametrize("field", FIELDS)
def test_gradient_of_each_result(field, device, dtype):
    logits = make((4, 6, 5), device, dtype).requires_grad_()
    exact = logits.detach().double().cpu().requires_grad_()
    actual = getattr(ops.predictive_statistics(logits), field)
    expected = dict(zip(FIELDS, reference.predictive_statistics(exact), strict=True))[field]
    (actual.square().sum() * 8).backward()
    (expected.square().sum() * 8).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(
        logits.grad.double().cpu(), exact.grad, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_gradient_does_not_depend_on_the_level_of_logits(level, device):
    grads = []
    for shift in (0.0, level):
        logits = (make((4, 6, 5), device) + shift).requires_grad_()
        loss = sum(value.square().sum() for value in ops.predictive_statistics(logits))
        grads.append(torch.autograd.grad(loss, logits)[0])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)  # the sum rounds 1e4 to 2e-12


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 3, 5, 2)], ids=str)
def test_gradient_of_views(shape, device):
    """Neither the logits nor the gradients of the results lie in order."""
    plain, order = make(shape, device), list(range(len(shape)))[::-1]
    view = plain.permute(order).contiguous().permute(order)
    grads = []
    for logits in (plain.requires_grad_(), view.requires_grad_()):
        loss = 0.0
        for value in ops.predictive_statistics(logits):
            order = list(range(value.dim()))[::-1]
            factor = torch.linspace(1, 2, value.numel(), device=device, dtype=value.dtype)
            loss = loss + (value.permute(order).flatten() * factor).sum()
        grads.append(torch.autograd.grad(loss, logits)[0])
    assert not view.is_contiguous() and torch.equal(*grads)


def test_gradient_where_a_class_is_impossible(device):
    logits = make((3, 2, 4), device)
    logits[:, :, 1] = -math.inf
    logits[0, 0, 2] = -math.inf
    logits.requires_grad_()
    statistics = ops.predictive_statistics(logits)
    (statistics.entropy - statistics.expected_entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[:, :, 1].any()


def test_state_that_autograd_has_kept_is_not_written_unnoticed(device):
    """As with torch's own operations in place."""
    state = [value.to(device) for value in (torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(3))]
    for i, kept in enumerate(state):
        factor = torch.ones_like(kept, requires_grad=True)
        loss = (factor * kept).sum()
        ops.predictive_accumulate_(*state, make((2, 3, 5), device, torch.float32), 2 * i)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- torch.library -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 3, 4, 5), (2, 0, 3)], ids=str)
def test_opcheck(shape, device, dtype):
    logits = make(shape, device, dtype)
    state = [value.clone() for value in ops.predictive_statistics(logits)]
    op = torch.ops.bnuq
    torch.library.opcheck(op.predictive_statistics.default, (logits,))
    torch.library.opcheck(op.predictive_statistics.default, (logits.clone().requires_grad_(),))
    torch.library.opcheck(op.predictive_accumulate_.default, (*state[:2], state[3], logits, 3))
    torch.library.opcheck(
        op.predictive_statistics_backward.default, (logits, state[0], *state[:2], None, state[3])
    )


def objective(logits):
    s = ops.predictive_statistics(logits * 2)
    return s.mean.square().sum() + s.variance.sum() + (s.entropy - s.expected_entropy).sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend=backend)
    a, b = (make((3, 4, 5), device, torch.float32).requires_grad_() for _ in range(2))
    torch.testing.assert_close(compiled(a), objective(b))
    compiled(a).backward()
    objective(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore")
def test_compile_accumulate(device):
    def function(mean, m2, entropy, logits):
        ops.predictive_accumulate_(mean, m2, entropy, logits, 0)
        return m2 / len(logits)

    logits = make((4, 3, 5), device, torch.float32)
    state = [torch.zeros(3, 5, device=device), torch.zeros(3, 5, device=device)]
    state.append(torch.zeros(3, device=device))
    variance = torch.compile(function, fullgraph=True, backend="aot_eager")(*state, logits)
    expected = ops.predictive_statistics(logits)
    assert torch.equal(variance, expected.variance) and torch.equal(state[0], expected.mean)


@pytest.mark.filterwarnings("ignore")
def test_export(device):
    class Statistics(torch.nn.Module):
        def forward(self, logits):
            return tuple(ops.predictive_statistics(logits))

    logits = make((3, 4, 5), device, torch.float32)
    exported = torch.export.export(Statistics(), (logits,)).module()
    for a, e in zip(exported(logits), Statistics()(logits), strict=True):
        assert torch.equal(a, e)


# ---- errors ------------------------------------------------------------------------------------

LOGITS = torch.ones(2, 3, 4)
STATE = {"mean": torch.zeros(3, 4), "m2": torch.zeros(3, 4), "expected_entropy": torch.zeros(3)}


@pytest.mark.parametrize(
    "logits, error, message",
    [
        ([1.0], TypeError, "logits must be a tensor, got list"),
        (
            LOGITS.int(),
            TypeError,
            "logits must be float32, float16, bfloat16 or float64, got torch.int32",
        ),
        (
            LOGITS[0],
            ValueError,
            "logits must have at least 3 dimensions (T, N, K, *), got [3, 4]",
        ),
        (LOGITS[:0], ValueError, "logits must hold at least 1 replica, got [0, 3, 4]"),
    ],
)
def test_rejects_logits(logits, error, message):
    for op, call in [
        ("predictive_statistics", lambda: ops.predictive_statistics(logits)),
        (
            "predictive_accumulate_",
            lambda: ops.predictive_accumulate_(**STATE, logits=logits, count=0),
        ),
    ]:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == f"{op}: {message}"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"mean": None}, TypeError, "mean must be a tensor, got NoneType"),
        ({"m2": torch.zeros(3, 5)}, ValueError, "m2 must have shape [3, 4], got [3, 5]"),
        (
            {"expected_entropy": torch.zeros(3, 4)},
            ValueError,
            "expected_entropy must have shape [3], got [3, 4]",
        ),
        (
            {"mean": torch.zeros(3, 4).double()},
            TypeError,
            "mean must be torch.float32, got torch.float64",
        ),
        ({"m2": torch.zeros(3, 4, device="meta")}, ValueError, "m2 must be on cpu, got meta"),
        (
            {"mean": torch.zeros(4, 3).T},
            ValueError,
            "mean must be contiguous, got strides (1, 3)",
        ),
        (
            {"m2": torch.zeros(3, 4, requires_grad=True)},
            ValueError,
            "m2 must need no gradient, got requires_grad=True",
        ),
        ({"count": -1}, ValueError, "count must lie in [0, 2^63), got -1"),
        ({"count": None}, TypeError, "count must be an integer, got None"),
    ],
)
def test_rejects_state(changes, error, message):
    with pytest.raises(error) as caught:
        ops.predictive_accumulate_(**{**STATE, "logits": LOGITS, "count": 0, **changes})
    assert str(caught.value) == f"predictive_accumulate_: {message}"


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0)], ids=str)
def test_nothing_is_accumulated(shape, device):
    mean, m2, entropy = (torch.zeros(s, device=device) for s in (shape[1:], shape[1:], shape[1:2]))
    ops.predictive_accumulate_(mean, m2, entropy, torch.zeros(shape, device=device), 0)
    assert not entropy.any()
