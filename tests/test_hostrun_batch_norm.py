"""The CUDA source of batch_norm_bank and batch_norm_fitted, forward and backward,
run on the CPU."""

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.calls import ACTIVATIONS, Kernels, acc_of

from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

# (N, C, S). channels_last is N := N * S, S := 1.
SHAPES = [
    (5, 6, 1),
    (1, 1, 1),
    (3, 5, 49),  # a row of odd length: single numbers
    (8, 5, 49),  # several of them merged into an aligned one
    (8, 3, 97),  # merged, several tiles
    (3, 4, 49),  # vectors across the border of two channels
    (2, 8, 8),
    (2, 3, 512),  # planes
    (3, 2, 1096),  # planes that end within a warp's segment
    (2, 3, 257),  # several tiles of single numbers
    (2, 524, 1),
    (700, 3, 1),  # several chunks of rows
]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
ORDERS = [0, 1, 2]
SLOPES = {"none": 1.0, "relu": 0.0, "leaky_relu": 0.1}
B = 4

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
shared_or_folded = pytest.mark.parametrize("shared", [True, False], ids=["shared", "folded"])


@pytest.fixture
def kernels():
    return Kernels(build.load())


def bits(tensor):
    """The memory of a tensor as numpy has it: 16-bit floats as uint16."""
    if tensor is None:
        return None
    return tensor.view(torch.uint16).numpy() if tensor.itemsize == 2 else tensor.numpy()


def tensor(array, dtype):
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype))


class Case:
    """Inputs of one call; what the kernels take as numpy arrays, and the float64 answer."""

    def __init__(self, dtype, shape, num_samples, shared, family=None, snapshot=None):
        random = torch.Generator().manual_seed(sum(shape))
        self.dtype, self.shape, self.num_samples, self.shared = dtype, shape, num_samples, shared
        self.torch_dtype, acc = getattr(torch, dtype), getattr(torch, np.dtype(acc_of(dtype)).name)
        size = shape if shared else (num_samples, *shape)
        self.x, self.residual = torch.randn(2, *size, generator=random).to(self.torch_dtype)
        self.grad_y = torch.randn(num_samples, *shape, generator=random).to(self.torch_dtype)
        self.weight, self.bias = torch.randn(2, shape[1], generator=random).to(acc)
        self.mean, self.var = (torch.rand(2, B, shape[1], generator=random) + 0.25).to(acc)
        self.params = (torch.rand(4, shape[1], generator=random) / 2 + 0.25).to(acc)
        self.seed, self.family, self.snapshot = ops.new_seed(5, 3), family, snapshot

    def source(self):
        if self.family:
            drawn = {"params": bits(self.params), "seed": self.seed.numpy()}
            return drawn | {"stream": 6, "family": self.family}
        chosen = {"seed": self.seed} if self.snapshot is None else {"snapshot": self.snapshot}
        given = {"mean": self.mean, "var": self.var} | chosen
        return {name: value.numpy() for name, value in given.items()}

    def forward(self, kernels, residual=True, affine=True, **options):
        options |= {"weight": bits(self.weight), "bias": bits(self.bias)} if affine else {}
        y = kernels.batch_norm(
            self.dtype,
            bits(self.x),
            self.num_samples,
            self.source(),
            residual=bits(self.residual) if residual else None,
            **options,
        )
        return tensor(y, self.dtype)

    def backward(self, kernels, y, affine=True, **options):
        options |= {"weight": bits(self.weight)} if affine else {}
        return kernels.batch_norm_backward(
            self.dtype,
            bits(self.grad_y),
            bits(self.x),
            bits(y),
            self.num_samples,
            self.source(),
            **options,
        )

    def statistics(self, kernels):
        """Mean and variance of each replica (T, C), float64."""
        if self.family:
            size = (self.num_samples, self.shape[1])
            noise = [kernels.philox_normal(self.seed.numpy(), 6, size, tag) for tag in (2, 3)]
            noise = [torch.from_numpy(z).double() for z in noise]
            return reference.fitted_moments(self.params.double(), *noise, self.family)
        rows = self.snapshot
        if rows is None:
            rows = reference.snapshot_indices(5, 3, B, self.num_samples)
        return self.mean.double()[rows], self.var.double()[rows]

    def expected(self, kernels, activation, residual=True, affine=True, inputs=None):
        """y (T, N, C, S) in float64; `inputs` replaces (x, residual)."""
        x, own_residual = inputs or (self.x.double(), self.residual.double())
        flat = (-1, *self.shape[1:])
        y = reference.batch_norm(
            x.reshape(flat),
            *self.statistics(kernels),
            self.weight.double() if affine else None,
            self.bias.double() if affine else None,
            residual=own_residual.reshape(flat) if residual else None,
            activation=activation,
            slope=0.1,
            shared=self.shared,
        )
        return y.view(self.num_samples, *self.shape)


# ---- forward -----------------------------------------------------------------------------------


@all_dtypes
@all_shapes
@shared_or_folded
def test_matches_reference_in_every_order(kernels, dtype, shape, shared, assert_close):
    which = SHAPES.index(shape) + DTYPES.index(dtype)
    activation, family = list(SLOPES)[which % 3], [None, "normal", "lognormal"][which // 3 % 3]
    case = Case(dtype, shape, 3, shared, family)
    options = {"residual": which % 2 == 0, "affine": which % 4 < 3}
    expected = case.expected(kernels, activation, **options)
    for off in ((), ACTIVATIONS):
        results = []
        for kernels.order in ORDERS:
            y = case.forward(kernels, off=off, slope=SLOPES[activation], **options)
            results.append(y)
        assert_close(results[0], expected)
        assert all(np.array_equal(bits(y), bits(results[0])) for y in results)


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
@pytest.mark.parametrize("shape", [(3, 5, 1), (2, 3, 512)], ids=["columns", "planes"])
@shared_or_folded
def test_activation_and_residual(kernels, shape, shared, residual, activation, assert_close):
    case = Case("float32", shape, 2, shared)
    y = case.forward(kernels, residual=residual, slope=SLOPES[activation])
    assert_close(y, case.expected(kernels, activation, residual=residual))


@pytest.mark.parametrize("family", ["normal", "lognormal"])
@pytest.mark.parametrize("shape", [(3, 21, 1), (2, 3, 512)], ids=["columns", "planes"])
@shared_or_folded
def test_fitted_is_the_cpus(kernels, shape, shared, family, assert_close):
    case = Case("float32", shape, 5, shared, family)
    case.params[3] *= 4  # so that some normal spreads meet their bound
    y = case.forward(kernels)
    assert_close(y, case.expected(kernels, "none"))
    flat = (-1, *shape[1:])
    on_cpu = ops.batch_norm_fitted(
        case.x.view(flat), case.params, case.seed, 6, 5, family,
        weight=case.weight, bias=case.bias, residual=case.residual.view(flat), shared=shared,
    )  # fmt: skip
    assert_close(y, on_cpu.view(y.shape))


@all_dtypes
@pytest.mark.parametrize("shape", [(3, 4, 49), (2, 3, 512)], ids=["columns", "planes"])
@shared_or_folded
def test_bank_is_the_cpus(kernels, dtype, shape, shared, assert_close):
    case = Case(dtype, shape, 5, shared)
    flat = (-1, *shape[1:])
    on_cpu = ops.batch_norm_bank(
        case.x.view(flat), case.mean, case.var, case.seed, num_samples=5,
        weight=case.weight, bias=case.bias, residual=case.residual.view(flat), shared=shared,
    )  # fmt: skip
    assert_close(case.forward(kernels), on_cpu.view(5, *shape))


@pytest.mark.parametrize("shape", [(2, 5, 1), (1, 2, 256)], ids=["columns", "planes"])
@shared_or_folded
def test_more_replicas_than_a_table_holds(kernels, shape, shared, assert_close):
    case = Case("float32", shape, 75, shared)
    for kernels.order in ORDERS:
        assert_close(case.forward(kernels), case.expected(kernels, "none"))


@all_shapes
@shared_or_folded
def test_a_snapshot_outside_the_bank_is_nan(kernels, shape, shared, assert_close):
    snapshot = torch.tensor([1, B, 3, -1, 2**40])
    case = Case("float32", shape, 5, shared, snapshot=snapshot)
    y = case.forward(kernels, slope=0.1)
    assert y[[1, 3, 4]].isnan().all()
    case.snapshot = torch.tensor([1, 0, 3, 0, 0])
    assert_close(y[[0, 2]], case.expected(kernels, "leaky_relu")[[0, 2]])


@shared_or_folded
def test_values_that_are_not_finite(kernels, shared):
    case = Case("float32", (2, 4, 1), 2, shared, snapshot=torch.tensor([0, 1]))
    case.residual.zero_(), case.weight.fill_(1)
    case.x[..., 0, 0], case.x[..., 1, 0], case.x[..., 2, 0] = np.inf, -np.inf, np.nan
    y = case.forward(kernels, slope=0.0)[..., 0]
    assert (y[..., 0] == np.inf).all() and (y[..., 1] == 0).all()
    assert y[..., 2].isnan().all() and y[..., 3].isfinite().all()


# ---- backward ----------------------------------------------------------------------------------


def expected_gradients(case, kernels, activation):
    """(grad_x, grad_residual) by autograd and the two sums, all float64."""
    inputs = [t.double().clone().requires_grad_() for t in (case.x, case.residual)]
    y = case.expected(kernels, activation, inputs=inputs)
    grad_y = case.grad_y.double()
    grads = torch.autograd.grad(y, inputs, grad_y)
    mean, var = (s.view(case.num_samples, 1, -1, 1) for s in case.statistics(kernels))
    g = torch.where(y > 0, grad_y, SLOPES[activation] * grad_y)
    terms = g, g * (case.x.double() - mean) / (var + 1e-5).sqrt()
    return *grads, torch.stack([term.sum((1, 3)) for term in terms])


@all_dtypes
@all_shapes
@shared_or_folded
def test_gradients_in_every_order(kernels, dtype, shape, shared, assert_close):
    which = SHAPES.index(shape) + DTYPES.index(dtype)
    activation, family = list(SLOPES)[which % 3], [None, "lognormal", "normal"][which // 3 % 3]
    case = Case(dtype, shape, 3, shared, family)
    slope = SLOPES[activation]
    y = case.forward(kernels, slope=slope) if slope != 1 else None
    expected = expected_gradients(case, kernels, activation)
    terms = shape[0] * shape[2]
    for off in ((), ACTIVATIONS):
        results = []
        for kernels.order in ORDERS:
            results.append(case.backward(kernels, y, off=off, slope=slope))
        for actual, e in zip(results[0][:2], expected[:2], strict=True):
            assert_close(tensor(actual, dtype), e, scale=4)
        assert_close(torch.from_numpy(results[0][2].copy()) / terms, expected[2] / terms)
        for other in results[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("need", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids=str)
@shared_or_folded
def test_only_what_is_needed(kernels, shared, need):
    case = Case("float32", (3, 4, 49), 3, shared)
    y = case.forward(kernels, slope=0.0)
    everything = case.backward(kernels, y, slope=0.0)
    some = case.backward(kernels, y, slope=0.0, need=need)
    for wanted, actual, whole in zip(need, some, everything, strict=True):
        assert np.array_equal(actual, whole) if wanted else actual is None


@pytest.mark.parametrize("num_samples", [1, 40])
@shared_or_folded
def test_gradients_of_few_and_many_replicas(kernels, shared, num_samples, assert_close):
    case = Case("float32", (2, 5, 1), num_samples, shared)
    y = case.forward(kernels, slope=0.0)
    expected = expected_gradients(case, kernels, "relu")
    for kernels.order in ORDERS:
        actual = case.backward(kernels, y, slope=0.0)
        for a, e in zip(actual, expected, strict=True):
            assert_close(torch.from_numpy(a.copy()), e, scale=4)


def test_a_slope_above_one(kernels):
    case = Case("float32", (2, 8, 8), 3, False)
    z, y = case.forward(kernels), case.forward(kernels, slope=2.0)
    assert torch.equal(y, torch.where(z < 0, 2 * z, z))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 512)], ids=["columns", "planes"])
def test_more_replicas_than_blocks(kernels, shape, assert_close):
    """In groups of two, the last of one."""
    case = Case("float32", shape, 1601, shared=True)
    assert_close(case.forward(kernels), case.expected(kernels, "none"))


@pytest.mark.parametrize("off", ["x", "residual", "y"])
@pytest.mark.parametrize(
    "shape, shared", [((2, 8, 8), False), ((2, 8, 8), True), ((3, 2, 512), True)], ids=str
)
def test_each_activation_alone_off_16_bytes(kernels, shape, shared, off, assert_close):
    case = Case("float32", shape, 3, shared)
    assert_close(case.forward(kernels, off=[off]), case.expected(kernels, "none"))


@pytest.mark.parametrize("off", ["weight", "bias", "mean", "var"])
def test_each_parameter_alone_off_16_bytes(kernels, off, assert_close):
    case = Case("float32", (5, 8, 1), 3, False)
    y = case.forward(kernels, residual=False, off=[off])
    assert_close(y, case.expected(kernels, "none", residual=False))


@pytest.mark.parametrize("off", ["grad_y", "y", "x", "grad_x", "grad_residual"])
@shared_or_folded
def test_each_gradient_alone_off_16_bytes(kernels, shared, off):
    case = Case("float32", (5, 8, 4), 3, shared)
    y = case.forward(kernels, slope=0.0)
    results = [case.backward(kernels, y, slope=0.0, off=o) for o in ((), [off])]
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_sums_of_more_parts_than_a_warp_takes_at_a_time(kernels, assert_close):
    """A channel of 259 tiles: 32 lanes add up eight each."""
    case = Case("float32", (1, 1, 265_000), 1, shared=True)
    sums = torch.from_numpy(case.backward(kernels, None, slope=1.0)[2])
    assert_close(sums / 265_000, expected_gradients(case, kernels, "none")[2] / 265_000)
