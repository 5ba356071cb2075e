"""The host run's own machinery: sound kernels run, and every kind of broken kernel is noticed."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.calls import placed

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

SEEDS = range(6)


@pytest.fixture(params=["plain", "ucontext"])
def module(request):
    """The machinery on both fiber switches, back in ascending order afterwards."""
    module = build.load(request.param)
    yield module
    module.set_order(0)


def run(module, name, x, y, n=None, **launch):
    module.probe(name, x, y, len(x) if n is None else n, **launch)
    return y


def test_sum_over_shuffles_and_shared_memory(module):
    x = np.random.default_rng(0).integers(-50, 50, 3001).astype(np.float32)
    for seed in SEEDS:
        module.set_order(seed)
        y = run(module, "sum", x, np.zeros(5, np.float32), grid=(5, 1, 1), block=(96, 1, 1))
        assert y.sum() == x.sum()


def test_dynamic_shared_memory(module):
    x = np.arange(200, dtype=np.float32)
    for seed in SEEDS:
        module.set_order(seed)
        y = run(module, "reverse", x, np.zeros_like(x), block=(256, 1, 1), shared_bytes=800)
        np.testing.assert_array_equal(y, x[::-1])


def test_shuffles_and_votes_by_lane(module):
    x = np.where(np.arange(32) % 3, 1.0, -1.0).astype(np.float32) * np.arange(
        1, 33, dtype=np.float32
    )
    y = run(module, "lanes", x, np.zeros((32, 8), np.float32))
    lane = np.arange(32)
    expected = [
        x[np.full(32, 5)],
        x[lane // 8 * 8 + 5],
        x[lane ^ 3],
        x[np.where(lane + 4 < 32, lane + 4, lane)],
        x[np.where(lane >= 4, lane - 4, lane)],
        np.full(32, (x > 0).sum()),
        np.full(32, 1.0),
        x[np.where(lane < 16, 1, 17)],
    ]
    np.testing.assert_array_equal(y, np.stack(expected, 1))


def test_every_thread_of_the_grid_runs_once(module):
    grid, block = (2, 3, 2), (5, 2, 3)
    for seed in SEEDS:
        module.set_order(seed)
        y = run(
            module,
            "place",
            np.zeros(1, np.float32),
            np.zeros((12, 30), np.float32),
            grid=grid,
            block=block,
        )
        np.testing.assert_array_equal(y, 100 * np.arange(12)[:, None] + np.arange(30))


def test_shared_memory_starts_as_nan(module):
    y = run(
        module,
        "unwritten_shared",
        np.zeros(1, np.float32),
        np.zeros(64, np.float32),
        64,
        block=(64, 1, 1),
    )
    assert np.isnan(y).all()


@pytest.mark.parametrize("name", ["sum_without_barrier", "reverse_without_barrier"])
def test_a_missing_barrier_shows_in_some_order(module, name):
    x = np.ones(128, np.float32)
    wrong = 0
    for seed in range(1, 11):
        module.set_order(seed)
        size = 1 if name.startswith("sum") else 128
        y = run(module, name, x, np.zeros(size, np.float32), block=(128, 1, 1), shared_bytes=512)
        wrong += not np.array_equal(y, [128.0] if size == 1 else x)
    assert wrong >= 5


@pytest.mark.parametrize(
    "name, message",
    [
        ("divergent_barrier", "a barrier diverged: .* waits in __syncthreads .* has returned"),
        ("two_barriers", "a barrier diverged: .* waits in __syncthreads .* waits in __syncthreads"),
        ("divergent_shuffle", "a warp diverged: .* waits for its warp .* has returned"),
        ("divergent_warp", "a warp diverged: .* waits for its warp .* waits for its warp"),
        ("absent_source", "a shuffle reads lane 9, which is not in the mask"),
        ("misaligned_hint", "a vector access at .*probes.cpp:[0-9]+ needs 16-byte alignment"),
        ("large_static", "shared memory must not exceed 49152 bytes, got 52000"),
    ],
)
def test_a_broken_kernel_is_reported(module, name, message):
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for seed in SEEDS:
        module.set_order(seed)
        with pytest.raises(RuntimeError, match=message):
            run(module, name, x, y)
    # The machinery goes on after a failure.
    assert run(module, "sum", np.ones(64, np.float32), np.zeros(1, np.float32))[0] == 64


def test_a_partial_warp_does_not_fill_the_mask(module):
    with pytest.raises(RuntimeError, match="lane 20 of the mask does not exist"):
        run(module, "sum", np.ones(64, np.float32), np.zeros(1, np.float32), block=(20, 1, 1))


@pytest.mark.parametrize(
    "launch, message",
    [
        ({"block": (1025, 1, 1)}, r"block must have 1 to 1024 threads, .* got \(1025, 1, 1\)"),
        ({"block": (1, 1, 65)}, "at most 64 along z"),
        ({"block": (0, 1, 1)}, "block must have 1 to 1024 threads"),
        ({"grid": (1, 0, 1)}, "grid must not be empty"),
        ({"grid": (2**31, 1, 1)}, "grid must lie within"),
        ({"grid": (1, 65536, 1)}, "grid must lie within"),
        ({"grid": (1, 1, 65536)}, "grid must lie within"),
        ({"shared_bytes": 49153}, "shared memory must not exceed 49152 bytes, got 49153"),
    ],
)
def test_refuses_launches_that_a_gpu_refuses(module, launch, message):
    with pytest.raises(ValueError, match=message):
        run(module, "sum", np.ones(4, np.float32), np.zeros(1, np.float32), **launch)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float16", "bfloat16"])
def test_mma_is_the_matrix_product(module, bfloat16):
    random = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if bfloat16 else torch.float16
    a, b = (torch.randn(shape, generator=random).to(dtype) for shape in [(16, 16), (16, 8)])
    c, d = torch.randn(16, 8, generator=random), np.zeros((16, 8), np.float32)
    module.mma(bfloat16, *(t.view(torch.uint16).numpy() for t in (a, b)), c.numpy(), d)
    expected = a.double() @ b.double() + c.double()
    np.testing.assert_allclose(d, expected.numpy(), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_by_fragment(module, transposed):
    """Register m of lane 4 g + t: matrix m, row g, columns 2 t and 2 t + 1; or column g,
    rows 2 t and 2 t + 1."""
    name = "matrices_transposed" if transposed else "matrices"
    y = run(module, name, np.zeros(1, np.float32), np.zeros((32, 4, 2), np.float32))
    matrices = np.arange(256, dtype=np.float32).reshape(4, 8, 8)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    np.testing.assert_array_equal(y, matrices.reshape(4, 32, 2).transpose(1, 0, 2))


def test_copies_come_when_they_are_waited_for(module):
    """Until then what stood there is lost: whoever still needs it must have it before the copy
    begins."""
    x, y = (placed(v.astype(np.float32)) for v in (np.arange(4), np.full(12, -1)))
    run(module, "copy", x, y, n=1, block=(1, 1, 1))
    assert np.isnan(y[8])
    np.testing.assert_array_equal(y[:8], [0, 1, 2, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(y[9:], [0, -1, -1])
    with pytest.raises(RuntimeError, match="returns with a copy that it has not waited for"):
        run(module, "copy", x, y, n=0, block=(1, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_conversions_are_torchs(dtype):
    module, bfloat16 = build.load(), dtype == torch.bfloat16
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    values = np.zeros(65536, np.float32)
    module.from_half(bits.numpy(), values, bfloat16)
    np.testing.assert_array_equal(values, bits.view(dtype).float().numpy())

    # Every value, its neighbours in float32, and the ties between it and the next one.
    finite = np.sort(values[np.isfinite(values)]).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    around = [
        finite.astype(np.float32),
        ties,
        np.nextafter(ties, np.inf),
        np.nextafter(ties, -np.inf),
    ]
    extremes = np.array([65519.0, 65520.0, 1e30, np.inf, -np.inf, 3.4e38, -3.4e38], np.float32)
    floats = np.concatenate([*around, extremes]).astype(np.float32)
    packed = np.zeros(len(floats), np.uint16)
    module.to_half(floats, packed, bfloat16)
    np.testing.assert_array_equal(packed, torch.tensor(floats).to(dtype).view(torch.uint16).numpy())

    module.to_half(np.array([np.nan], np.float32), packed, bfloat16)
    assert packed[0] == 0x7FFF


# ---- AddressSanitizer and UBSan ----------------------------------------------------------------

SCRIPT = """
import sys, numpy
sys.path.insert(0, sys.argv[1])
from hostrun import build
module = build.load_file(build.BUILD / "hostrun_sanitized.so")
x = numpy.ones(64, numpy.float32)
for seed in range(4):
    module.set_order(seed)
    y = numpy.zeros(256 if sys.argv[2] == "lanes" else 32, numpy.float32)
    module.probe(sys.argv[2], x, y, 32, shared_bytes=128)
print("unharmed")
"""


def run_sanitized(*arguments):
    build.build("sanitized")
    command, env = [sys.executable, *arguments], build.sanitizer_environment()
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def run_probe(name):
    return run_sanitized("-c", SCRIPT, str(build.HERE.parent), name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("overflow_global", "heap-buffer-overflow"),
        ("overflow_dynamic", "use-after-poison"),
        ("overflow_shared", "index 32 out of bounds"),
        ("misaligned_plain", "misaligned address"),
    ],
)
def test_the_sanitizers_stop_a_broken_kernel(name, message):
    done = run_probe(name)
    assert done.returncode != 0 and message in done.stderr and "unharmed" not in done.stdout


@pytest.mark.parametrize("name", ["sum", "lanes", "divergent_barrier"])
def test_the_sanitizers_let_the_machinery_be(name):
    done = run_probe(name)
    if name == "divergent_barrier":
        assert "RuntimeError: hostrun: a barrier diverged" in done.stderr
    else:
        assert done.stdout == "unharmed\n", done.stderr
    assert "Sanitizer" not in done.stderr


def test_every_kernel_under_the_sanitizers():
    done = run_sanitized(str(build.HERE / "sanitized_case.py"), "sanitized")
    assert done.returncode == 0 and done.stdout == "every kernel ran\n", done.stderr[-4000:]
