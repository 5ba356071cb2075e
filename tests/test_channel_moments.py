"""Mean and biased variance of channels, against float64; on a GPU torch computes them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from bnuq_ext.ops.channel_moments import channel_moments

SHAPES = [
    *((2, 1), (7, 3), (5000, 3), (5001, 30), (20, 1001), (1, 4, 9), (3, 2, 40_000)),
    *((2, 300, 5), (33, 20, 17, 19), (2, 5, 3, 4, 6), (1, 2, 300, 300)),
]


def expect(x):
    others = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.double(), others, correction=0)
    return mean, var


def make(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    scale = torch.logspace(-2, 2, shape[1], dtype=torch.float64).view(-1, *[1] * (len(shape) - 2))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + 3).to(dtype)


def assert_equal(x, rtol=1e-6):
    for actual, expected in zip(channel_moments(x), expect(x), strict=True):
        assert actual.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_matches_float64(shape, dtype):
    x = make(*shape, dtype=dtype)
    rtol = 1e-11 if dtype == torch.float64 else 1e-6
    assert_equal(x, rtol)
    if x.dim() > 3:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        assert_equal(x.contiguous(memory_format=last), rtol)


def test_of_any_strides():
    x = make(12, 8, 6, 10)
    for view in (x[::2], x[:, 1::3], x[..., ::2], x.transpose(0, 1), x[:1].expand(5, -1, -1, -1)):
        assert_equal(view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_numbers_have_no_variance(dtype):
    x = torch.tensor([0.1, -7e4, 3e-30, 0.0], dtype=dtype)
    for shape in ((1000, 4), (10, 4, 100), (7, 4, 11, 13)):
        mean, var = channel_moments(x.view(-1, *[1] * (len(shape) - 2)).expand(shape).contiguous())
        assert torch.equal(mean, x.float()) and not var.any()


def test_far_from_zero():
    """A sum of squares from 0 on would leave nothing of a spread of 1e-4 of the mean."""
    x = 1e4 + make(500, 4, 7)
    assert_equal(x)
    x = 1e9 + x.double()
    torch.testing.assert_close(channel_moments(x)[1], expect(x - 1e9)[1], rtol=1e-9, atol=0)


def test_the_order_of_rows_does_not_matter():
    x = make(3000, 40)
    shuffled = x[torch.randperm(3000, generator=torch.Generator().manual_seed(0))]
    for a, b in zip(channel_moments(x), channel_moments(shuffled), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(5000, 30), (40, 30, 20, 20), (1, 3, 500, 500)])
def test_number_of_threads_does_not_matter(shape, set_threads):
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append(channel_moments(make(*shape, dtype=torch.float64)))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 5])
def test_what_is_not_finite_shows(value, at):
    x = make(9, 3)
    x[at, 1] = value
    expected = x.mean(0), x.var(0, correction=0)
    torch.testing.assert_close(channel_moments(x), expected, equal_nan=True)


def test_gradients_flow():
    x = make(6, 2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(channel_moments, x)
    with torch.no_grad():
        assert not channel_moments(x)[0].requires_grad


@pytest.mark.filterwarnings("ignore")  # torch's own, of its formulas for tangents
def test_tangents_flow():
    x, tangent = make(6, 2, 5), make(6, 2, 5) - 3
    with forward_ad.dual_level():
        moments = [
            forward_ad.unpack_dual(m) for m in channel_moments(forward_ad.make_dual(x, tangent))
        ]
    centred = x - x.mean((0, 2), keepdim=True)
    torch.testing.assert_close(moments[0].tangent, tangent.mean((0, 2)))
    torch.testing.assert_close(moments[1].tangent, 2 * (centred * tangent).mean((0, 2)))


def test_the_op_is_one_of_torchs():
    torch.library.opcheck(torch.ops.bnuq.channel_moments.default, (make(5, 3, 4),))


def test_where_there_are_no_values():
    with FakeTensorMode():
        assert [m.shape for m in channel_moments(torch.empty(4, 3, 2))] == [(3,), (3,)]
    mean, var = torch.func.vmap(channel_moments)(torch.ones(2, 4, 3))
    assert mean.shape == var.shape == (2, 3)


@pytest.mark.parametrize("shape", [(5,), (0, 3), (4, 0)])
def test_the_op_wants_numbers(shape):
    with pytest.raises(
        RuntimeError, match=r"channel_moments: x must be \(N, C, \*\), with numbers"
    ):
        torch.ops.bnuq.channel_moments(torch.ones(shape))
