"""The CUDA source where a tensor has more than 2^31 numbers: the last blocks of a grid,
run on the CPU.

The tensors are mapped, not allocated: only the pages that these blocks touch exist.
"""

import errno
import mmap

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.bayes import NOTHING
from hostrun.calls import batch_norm_arguments, state_arguments

from bnuq_ext import reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

NO_RESERVE = 0x4000  # of mmap; the module has a name for it from Python 3.13 on
BLOCKS = 16
EPS = 1e-5


@pytest.fixture
def module():
    module = build.load()
    module.set_last_blocks(BLOCKS)
    yield module
    module.set_last_blocks(0)


def mapped(shape, dtype):
    """Zeros."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        pytest.skip(f"{size >> 30} GiB of addresses are not to be had")


def random_bits(*shape, seed=0):
    """(bfloat16 numbers as they lie in memory, in float64)."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.view(torch.uint16).numpy(), values.double().numpy()


def values_of(bits):
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).double().numpy()


def fill_tails(array, tail, seed):
    """Random numbers at the end of each replica; what they are, float64."""
    bits, values = random_bits(len(array), tail, seed=seed)
    array.reshape(len(array), -1)[:, -tail:] = bits
    return values


def assert_rounded(bits, expected):
    """To bfloat16, from sums that are off by little."""
    np.testing.assert_allclose(values_of(bits), expected, rtol=2**-8, atol=1e-3)


# ---- batch norm: (T, N, C, S), and how much of the end is filled and looked at -----------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "folded"])
@pytest.mark.parametrize(
    "sizes, tail",
    # The second: so many rows that a block has all replicas, more than its table holds.
    [((4, 2**20, 768, 1), 768), ((75, 2**22, 8, 1), 8), ((4, 1500, 512, 1024), 1024)],
    ids=["columns", "replicas", "planes"],
)
def test_batch_norm(module, sizes, tail, shared):
    T, _, C, S = sizes
    x, y = mapped(sizes[1:] if shared else sizes, np.uint16), mapped(sizes, np.uint16)
    assert y.size > 2**31
    values = fill_tails(x[None] if shared else x, tail, 0)
    mean, var = np.random.default_rng(0).random((2, T, C)).astype(np.float32)
    source = {"mean": mean, "var": var, "snapshot": np.arange(T)}
    arguments = batch_norm_arguments("bfloat16", x, T, source, eps=EPS)
    module.batch_norm(**arguments | {"x": x, "residual": None, "y": y})
    channels = C - tail // S + np.arange(tail) // S
    own_mean, scale = mean[:, channels], (var[:, channels].astype(np.float64) + EPS) ** -0.5
    ends = y.reshape(T, -1)[:, -tail:]
    assert_rounded(ends[-1], ((values - own_mean) * scale)[-1])
    if shared:  # one block, all replicas
        assert_rounded(ends, (values - own_mean) * scale)

    grad_y, grad_x = mapped(sizes, np.uint16), mapped(x.shape, np.uint16)
    grads = fill_tails(grad_y, tail, 1) * scale
    given = {"grad_y": grad_y, "y": None, "x": None, "grad_x": grad_x}
    module.batch_norm_backward(**arguments | given | {"grad_residual": None, "sums": None})
    expected = grads.sum(0) if shared else grads[-1]
    assert_rounded(grad_x.reshape(-1)[-tail:], expected)


def test_sums(module):
    sizes = T, N, C, S = 4, 2, 400_000, 1024
    x, grad_y = (mapped(sizes, np.uint16) for _ in range(2))
    assert x.size > 2**31
    bits, values = random_bits(2, N, S)
    x[-1, :, -1], grad_y[-1, :, -1] = bits
    mean, var = np.random.default_rng(0).random((2, T, C)).astype(np.float32)
    source = {"mean": mean, "var": var, "snapshot": np.arange(T)}
    sums = np.zeros((2, T, C), np.float32)
    arguments = batch_norm_arguments("bfloat16", x, T, source, eps=EPS)
    given = {"grad_y": grad_y, "y": None, "x": x, "grad_x": None, "grad_residual": None}
    module.batch_norm_backward(**arguments | given | {"sums": sums})
    terms = values[1] * (values[0] - mean[-1, -1]) / np.sqrt(float(var[-1, -1]) + EPS)
    np.testing.assert_allclose(sums[1, -1, -1], terms.sum(), rtol=1e-4)


@pytest.mark.parametrize("C", [3, 8], ids=["single", "vectors"])
def test_a_thread_takes_several_turns(module, C):
    """So many blocks that each takes rows again and again."""
    T, N = 3200, 8192
    x, y, grad_y, grad_x = (mapped((T, N, C, 1), np.uint16) for _ in range(4))
    values, grads = fill_tails(x, N * C, 0)[-1], fill_tails(grad_y, N * C, 1)[-1]
    mean, var = np.random.default_rng(0).random((2, 1, C)).astype(np.float32)
    source = {"mean": mean, "var": var, "snapshot": np.zeros(T, np.int64)}
    arguments = batch_norm_arguments("bfloat16", x, T, source, eps=EPS)
    module.batch_norm(**arguments | {"x": x, "residual": None, "y": y})
    scale = (var[0].astype(np.float64) + EPS) ** -0.5
    expected = (values.reshape(N, C) - mean[0]) * scale
    assert_rounded(y[-1, :, :, 0], expected)

    given = {"grad_y": grad_y, "y": None, "x": x, "grad_x": grad_x, "grad_residual": None}
    sums = np.zeros((2, T, C), np.float32)
    module.batch_norm_backward(**arguments | given | {"sums": sums})
    assert_rounded(grad_x[-1, :, :, 0], grads.reshape(N, C) * scale)
    terms = grads.reshape(N, C) * expected
    np.testing.assert_allclose(sums[1, -1], terms.sum(0), rtol=1e-4, atol=2e-2)


# ---- predictive: (T, N, K, S) ------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [(4, 2**23, 96, 1), (4, 2**17, 10, 600), (4, 2**21, 380, 1), (4, 190_000, 4200, 1)],
    ids=["lanes", "columns", "block", "wide"],
)
def test_predictive(module, sizes):
    T, N, K, S = sizes
    logits, out = mapped(sizes, np.uint16), mapped(sizes, np.uint16)
    assert logits.size > 2**31
    bits, values = random_bits(T, K)
    logits[:, -1, :, -1] = bits
    state = [mapped(shape, np.float32) for shape in ((N, K, S), (N, K, S), (N, S))]
    entropy = mapped((N, S), np.float32)
    arguments = state_arguments("bfloat16", np.empty(sizes[:3] + (0,)), state, 0)
    arguments |= {"logits": logits, "S": S}
    module.predictive(**arguments, entropy=entropy)
    wide = torch.from_numpy(values).view(T, 1, K, 1).requires_grad_()
    outputs = reference.predictive_statistics(wide)
    ends = state[0][-1, :, -1], state[1][-1, :, -1], entropy[-1, -1], state[2][-1, -1]
    for actual, wanted in zip(ends, outputs, strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy().squeeze(), rtol=1e-4, atol=1e-7)

    grad_mean = mapped((N, K, S), np.float32)
    grad_mean[-1, :, -1] = np.random.default_rng(0).random(K)
    grad = torch.from_numpy(grad_mean[-1, :, -1].astype(np.float64)).view(1, K, 1)
    (expected,) = torch.autograd.grad(outputs[0], wide, grad)
    arguments |= {"m2": None, "expected_entropy": None, "grad_mean": grad_mean}
    module.predictive_backward(**arguments, grad_logits=out)
    expected = expected.numpy().reshape(T, K)
    bound = 2**-8 * np.abs(expected) + 1e-4 * np.abs(expected).max()
    assert (np.abs(values_of(out[:, -1, :, -1]) - expected) <= bound).all()


# ---- bayes_linear: the end is what a call of the last replica alone gives ----------------------


def run(module, kernel, dtype, out, last=0, **arguments):
    """`last` replicas come before those of the call."""
    one = np.ones((), np.float32)
    scales = {"x_scale": one, "sigma_scale": one, "grad_scale": one}
    seed = np.array([5, 3 + last])
    module.bayes(
        **NOTHING | scales | arguments | dict(kernel=kernel, dtype=dtype, seed=seed, out=out)
    )
    return out


@pytest.mark.parametrize("N", [8, 9], ids=["direct", "staged"])
@pytest.mark.parametrize(
    "T, O, I, shared", [(70_000, 4096, 16, True), (140_000, 16, 2048, False)], ids=["y", "x"]
)
def test_forward(module, N, T, O, I, shared):  # noqa: E741
    x = mapped((1 if shared else T, N, I), np.uint16)
    y = mapped((T, N, O), np.float32)
    assert max(x.size, y.size) > 2**31
    x[-1] = random_bits(N, I)[0]
    sigma = random_bits(O * I)[0]
    base = mapped((len(x), N, O), np.float32)
    sizes = dict(N=N, O=O, I=I, shared=shared, sigma=sigma)
    run(module, "forward", "bfloat16", y, T=T, x=x, base=base, **sizes)
    module.set_last_blocks(0)
    one = dict(T=1, x=x[-1:].copy(), base=base[-1:].copy())
    expected = run(
        module, "forward", "bfloat16", np.zeros((1, N, O), np.float32), T - 1, **one, **sizes
    )
    # The last block has 128 outputs at the most.
    assert np.abs(expected).min() > 0
    np.testing.assert_allclose(y[-1, :, -16:], expected[0, :, -16:], rtol=1e-4, atol=1e-4)


def test_grad_x(module):
    T, N, O, I = 140_000, 8, 2048, 16  # noqa: E741
    grad, out = mapped((T, N, O), np.uint16), mapped((T, N, I), np.float32)
    assert grad.size > 2**31
    grad[-1], sigma = random_bits(N, O)[0], random_bits(O * I)[0]
    sizes = dict(N=N, O=O, I=I, sigma=sigma)
    run(module, "grad_x", "bfloat16", out, T=T, grad=grad, **sizes)
    module.set_last_blocks(0)
    one, expected = grad[-1:].copy(), np.zeros((1, N, I), np.float32)
    run(module, "grad_x", "bfloat16", expected, T - 1, T=1, grad=one, **sizes)
    assert np.abs(expected).min() > 0
    np.testing.assert_allclose(out[-1:], expected, rtol=1e-4, atol=1e-4)


def test_noise_in_memory(module):
    T, O, I = 600, 2048, 2048  # noqa: E741
    sizes = dict(sigma=random_bits(O * I)[0], O=O, I=I)

    def noise(last, replicas):
        out = mapped((replicas, O, I), np.uint16)
        return run(module, "sample_noise", "bfloat16", out, last, T=replicas, **sizes)

    weight, one = noise(0, T), noise(T - 1, 1)
    assert weight.size > 2**31
    assert one[0, -1, -256:].any()
    np.testing.assert_array_equal(weight[-1, -1, -256:], one[0, -1, -256:])


@pytest.mark.parametrize("N", [1, 8], ids=["one_row", "rows"])
@pytest.mark.parametrize("end", ["y", "x"])
def test_the_direct_way(module, N, end):
    T = 2**31 // (4096 * N) + 70
    O, I = (4096, 16) if end == "y" else (16, 4096)  # noqa: E741
    random = np.random.default_rng(0)
    mu, rho = random.normal(size=(2, O, I)).astype(np.float32)
    sizes = dict(N=N, O=O, I=I, mu=mu, rho=rho)
    x, grad = mapped((T, N, I), np.float32), mapped((T, N, O), np.float32)
    assert max(x.size, grad.size) > 2**31
    x[-1], grad[-1] = random.normal(size=(N, I)), random.normal(size=(N, O))
    one = dict(T=1, x=x[-1:].copy(), grad=grad[-1:].copy())
    for kernel, like in (("direct_forward", grad), ("direct_grad_x", x)):
        given = {k: v for k, v in dict(x=x, grad=grad).items() if v is not like}
        out = run(module, kernel, "float32", mapped(like.shape, np.float32), T=T, **given, **sizes)
        module.set_last_blocks(0)
        shape = (1, *like.shape[1:])
        expected = run(
            module, kernel, "float32", np.zeros(shape, np.float32), T - 1, **one, **sizes
        )
        module.set_last_blocks(BLOCKS)
        assert np.abs(expected).min() > 0
        np.testing.assert_allclose(out[-1, :, -16:], expected[0, :, -16:], rtol=1e-4, atol=1e-4)
