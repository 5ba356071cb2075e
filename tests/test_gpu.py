"""What only a GPU can show: streams, graphs, sizes beyond 2^31, memory, and the CPU's own numbers.

Formulas, dtypes and layouts are in the other files, which run on every device that is there.
"""

import copy
import functools

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

T, N, C, B = 6, 8, 16, 5
HUGE = 2**31 + 2**20


@functools.cache  # nothing is copied from the CPU in the middle of a stream or a capture
def made(*shape, dtype=torch.float32, positive=False):
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.rand(shape, generator=generator) + 0.5
    return (values if positive else values - 1).to("cuda", dtype)


def bank():
    return made(B, C), made(B, C, positive=True)


def bank_op(x, seed, **options):
    return ops.batch_norm_bank(x, *bank(), seed, num_samples=T, shared=True, **options)


def fitted_op(x, seed, **options):
    params = made(4, C, positive=True)
    return ops.batch_norm_fitted(x, params, seed, 3, T, "lognormal", shared=True, **options)


def statistics_op(x, seed, **options):
    return ops.predictive_statistics(x.reshape(2, -1, 16) * seed[1]).entropy


OPS = pytest.mark.parametrize("op", [bank_op, fitted_op, statistics_op])


def needs_memory(gigabytes):
    free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0
    return pytest.mark.skipif(free < gigabytes, reason=f"needs {gigabytes} GiB of GPU memory")


# ---- random numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [0, 1, -1, 2**62 + 12345])
@pytest.mark.parametrize("first", [0, 7, 2**40])
def test_words_are_the_cpus(key, first):
    on_cpu, on_gpu = (ops.new_seed(key, first, device) for device in ("cpu", "cuda"))
    # Every snapshot hangs on the bits of 31 Philox calls.
    for num_snapshots in (1, 3, 64, 1000):
        expected = ops.snapshot_indices(on_cpu, num_snapshots, 3000)
        assert torch.equal(ops.snapshot_indices(on_gpu, num_snapshots, 3000).cpu(), expected)


@pytest.mark.parametrize("shape", [(3, 70001), (2, 259, 263)], ids=str)
def test_normals_are_the_cpus(shape):
    on_cpu, on_gpu = (ops.new_seed(11, 5, device) for device in ("cpu", "cuda"))
    expected = ops.philox_normal(on_cpu, 9, shape)
    error = (ops.philox_normal(on_gpu, 9, shape).cpu() - expected).abs()
    # lg2.approx is off by 2^-22 absolutely, which near z = 0 its square root makes 5e-4. Another
    # word would be off by about 1.
    assert error.max() < 2e-3 and error.mean() < 2e-6


# ---- determinism -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_repeats_are_bit_equal(dtype, memory_format):
    x = made(N, C, 14, 14, dtype=dtype).contiguous(memory_format=memory_format)
    leaves = [t.clone().requires_grad_() for t in (x, *bank(), made(C), made(C, positive=True))]

    def once():
        y = ops.batch_norm_bank(
            *leaves[:3],
            ops.new_seed(3, 0, "cuda"),
            num_samples=T,
            weight=leaves[3],
            bias=leaves[4],
            activation="relu",
            shared=True,
        )
        return y, *torch.autograd.grad(y, leaves, torch.ones_like(y))

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


# ---- streams and graphs ------------------------------------------------------------------------


@OPS
def test_runs_on_the_current_stream(op):
    seed, new = ops.new_seed(3, 1, "cuda"), made(N, C, 8, 8)
    expected, x = op(new, seed), torch.zeros_like(new)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # another stream would read the zeros meanwhile
        x.copy_(new)
        y = op(x, seed)
    stream.synchronize()
    assert torch.equal(y, expected)


@OPS
def test_eight_streams_at_once(op):
    seeds = [ops.new_seed(k, 1, "cuda") for k in range(8)]
    inputs = [made(N, C, 8, 8) * (k + 1) for k in range(8)]
    expected = [op(x, seed) for x, seed in zip(inputs, seeds, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, x, seed in zip(streams, inputs, seeds, strict=True):
            with torch.cuda.stream(stream):
                results.append(op(x, seed))
        torch.cuda.synchronize()
        assert all(torch.equal(y, e) for y, e in zip(results, expected, strict=True))


@pytest.mark.parametrize("op", [bank_op, fitted_op])
def test_a_graph_draws_afresh_at_every_replay(op):
    x, seed = made(N, C, 8, 8), ops.new_seed(3, 0, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(x, seed)
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, seed)
        seed[1] += T
    seen = []
    for replay in range(3):
        graph.replay()
        seen.append(y.clone())
        assert torch.equal(y, op(x, ops.new_seed(3, replay * T, "cuda")))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


# ---- sizes and addresses -----------------------------------------------------------------------


@needs_memory(12)
@pytest.mark.parametrize("positions", [1, 4096], ids=["columns", "planes"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "folded"])
def test_more_than_2_31_elements(shared, positions):
    num_samples, channels = 4, 8
    rows = HUGE // (num_samples * channels * positions)
    leading = rows if shared else num_samples * rows
    x = torch.empty(leading, channels, positions, dtype=torch.bfloat16, device="cuda").normal_()
    mean, var = made(num_samples, channels), made(num_samples, channels, positive=True)
    snapshot = torch.arange(num_samples, device="cuda")
    y = ops.batch_norm_bank(x, mean, var, snapshot=snapshot, activation="relu", shared=shared)
    assert y.numel() > 2**31
    for t in (0, num_samples - 1):
        for place in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
            own = x[place] if shared else x[t * rows : (t + 1) * rows][place]
            expected = reference.batch_norm(
                own.double(), mean[t : t + 1].double(), var[t : t + 1].double(), activation="relu"
            )
            actual = y[t * rows : (t + 1) * rows][place]
            torch.testing.assert_close(actual.double(), expected, rtol=1.6e-2, atol=1.6e-2)


@needs_memory(40)
def test_statistics_of_more_than_2_31_logits():
    num_rows, classes = 2**20 + 1, 1025
    logits = torch.empty(2, num_rows, classes, device="cuda", dtype=torch.bfloat16)
    logits[0].normal_()
    logits[1] = -logits[0]
    actual = ops.predictive_statistics(logits)
    for place in (slice(0, 3), slice(num_rows - 3, num_rows)):
        expected = reference.predictive_statistics(logits[:, place].double())
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a[place].double(), e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_views(offset):
    shape = (N, C, 8, 8)
    x = made(N * C * 64 + offset, dtype=torch.float16)[offset:].view(shape)
    assert x.data_ptr() % 16
    seed = ops.new_seed(3, 1, "cuda")
    assert torch.equal(bank_op(x, seed), bank_op(x.clone(), seed))


def test_a_snapshot_outside_the_bank_is_nan():
    snapshot = torch.tensor([0, B, 1, -1], device="cuda")
    y = ops.batch_norm_bank(made(N, C), *bank(), snapshot=snapshot, shared=True).view(4, N, C)
    assert y[[1, 3]].isnan().all() and y[[0, 2]].isfinite().all()


def test_every_device_of_the_machine():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, seed = made(N, C, 8, 8), ops.new_seed(3, 1, "cuda")
    mean, var = bank()
    expected = ops.batch_norm_bank(x, mean, var, seed, num_samples=T, shared=True)
    moved = [t.to("cuda:1") for t in (x, mean, var, seed)]
    y = ops.batch_norm_bank(*moved, num_samples=T, shared=True)
    assert y.device == torch.device("cuda:1") and torch.equal(y.to("cuda:0"), expected)


# ---- whole models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A small convolutional network, converted, with a bank; on the CPU.
    Its logits differ from draw to draw."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    converted = bnuq.convert(nn.Sequential(*layers).eval())
    batches = [torch.randn(32, 3, 16, 16) for _ in range(12)]
    bnuq.collect(converted, batches, num_batches=len(batches), progress=False)
    with torch.no_grad():
        converted[-1].weight.mul_(30)
    return converted


def predict(model, x, num_samples, **options):
    options = {"likelihood": "categorical", "num_samples": num_samples, "seed": 5} | options
    return bnuq.predict(model, x, **options)


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
def test_predict_agrees_with_the_cpu(model, sampler, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    on_cpu = predict(model, x, 16, sampler=sampler)
    on_gpu = predict(copy.deepcopy(model).cuda(), x.cuda(), 16, sampler=sampler)
    if sampler == "bank":
        assert torch.equal(on_gpu.snapshots.cpu(), on_cpu.snapshots)
    tolerance = dict(rtol=1e-4, atol=5e-5)
    for name in ("mean", "variance", "entropy"):
        actual, expected = getattr(on_gpu, name).cpu(), getattr(on_cpu, name)
        torch.testing.assert_close(actual, expected, **tolerance)
    other = predict(model, x, 16, sampler=sampler, seed=6)
    for name in ("mean", "entropy"):  # or the above shows nothing
        assert not torch.allclose(getattr(other, name), getattr(on_cpu, name), **tolerance)


@pytest.mark.parametrize("sampler", ["bank", "joint"])
def test_streams_share_no_draw(model, sampler):
    model, x = copy.deepcopy(model).cuda(), torch.randn(64, 3, 64, 64, device="cuda")
    expected = [predict(model, x, 16, sampler=sampler, seed=seed).mean for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream, which in [(streams[0], 0), (streams[1], 0), (streams[0], 1)] * 10:
        with torch.cuda.stream(stream):
            results.append((predict(model, x, 16, sampler=sampler, seed=which + 1).mean, which))
    torch.cuda.synchronize()
    for actual, which in results:
        torch.testing.assert_close(actual, expected[which], rtol=1e-4, atol=5e-5)
    assert not torch.allclose(*expected, rtol=1e-4, atol=5e-5)


def peak_of_predict(model, x, num_samples, **options):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    predict(model, x, num_samples, **options)
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_does_not_grow_with_replicas(model):
    model, x = copy.deepcopy(model).cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    predict(model, x, 4, chunk=4)
    few, many = (peak_of_predict(model, x, n, chunk=4) for n in (4, 64))
    assert many <= 1.05 * few


def test_no_memory_is_left_behind(model):
    model, x = copy.deepcopy(model).cuda(), torch.randn(16, 3, 32, 32, device="cuda")
    predict(model, x, 8)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        predict(model, x, 8)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.filterwarnings("ignore:Plan failed with an OutOfMemoryError")  # cuDNN's, which goes on
def test_out_of_memory_halves_the_chunk(model, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = copy.deepcopy(model).cuda(), torch.randn(64, 3, 64, 64, device="cuda")
    expected = predict(model, x, 64, chunk=1)
    one, all_at_once = (peak_of_predict(model, x, n, chunk=n) for n in (1, 64))
    assert all_at_once > 8 * one  # or the limit below would not bite
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + all_at_once // 4
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        limited = predict(model, x, 64, chunk=64)
        assert torch.cuda.max_memory_reserved() <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(limited.mean, expected.mean, rtol=1e-4, atol=5e-5)
    assert torch.equal(limited.snapshots, expected.snapshots)
