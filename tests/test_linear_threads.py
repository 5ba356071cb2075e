"""bayes_linear from several threads at once: each has its own memory for a replica's weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bnuq_ext import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_at_once(dtype):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    generator = torch.Generator().manual_seed(0)
    x, mu, rho = draw(16, 512), draw(384, 512), draw(384, 512)

    def run(stream):
        return ops.bayes_linear(x, mu, rho, seed=seed, stream=stream, num_samples=5)

    seed = ops.new_seed(1)
    alone = [run(stream) for stream in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, list(range(16)) * 4))
    assert all(torch.equal(y, alone[i % 16]) for i, y in enumerate(together))


def draw_all(dtype, per_replica, T):
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, 9, 40) if per_replica else (9, 40), (24, 40), (24, 40), (24,), (24,)]
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def outputs_and_grads(inputs, T):
    y = ops.bayes_linear(*inputs, seed=ops.new_seed(3), stream=1, num_samples=T)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y.detach(), *torch.autograd.grad(y, inputs, weights)


@pytest.fixture
def threads():
    """Sets torch's number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("per_replica", [False, True])
@pytest.mark.parametrize("T", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_number_of_threads(dtype, T, per_replica, threads):
    """Threads take whole replicas where they come out even, else they share each."""
    inputs = draw_all(dtype, per_replica, T)
    threads(1)
    expected = outputs_and_grads(inputs, T)
    for count in (2, 3, 16):
        threads(count)
        torch.testing.assert_close(outputs_and_grads(inputs, T), expected)
        assert all(map(torch.equal, outputs_and_grads(inputs, T), outputs_and_grads(inputs, T)))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("per_replica", [False, True])
def test_threads_in_inference_mode(mode, per_replica, threads):
    """torch's other threads know nothing of a mode; tensors that are made in it forbid much."""
    threads(2)
    T = 4
    expected = outputs_and_grads(draw_all(torch.float32, per_replica, T), T)[0]
    with mode():
        inputs = draw_all(torch.float32, per_replica, T)
        y = ops.bayes_linear(*inputs, seed=ops.new_seed(3), stream=1, num_samples=T)
        assert torch.equal(y, expected)
        assert y.is_inference() == (mode is torch.inference_mode)
