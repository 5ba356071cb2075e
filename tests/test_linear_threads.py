"""bayes_linear from several threads at once: each has its own memory for a replica's weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from one_link import bayes_linear_kl

from benchmarks.memory import peak_extra_bytes
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


def call(inputs, T):
    return ops.bayes_linear(*inputs, seed=ops.new_seed(3), stream=1, num_samples=T)


def call_with_kl(inputs, T):
    options = dict(seed=ops.new_seed(3), stream=1, num_samples=T, prior_std=0.5)
    return bayes_linear_kl(*inputs, **options)[0]


def outputs_and_grads(op, inputs, T):
    y = op(inputs, T)
    weights = torch.linspace(-1, 1, y.numel()).to(y.dtype).reshape(y.shape)
    asked = [t for t in inputs if t.requires_grad]
    return y.detach(), *torch.autograd.grad(y, asked, weights)


def check_threads(set_threads, op, inputs, T, **tolerance):
    """Against one thread; and the same bits again."""
    set_threads(1)
    expected = outputs_and_grads(op, inputs, T)
    for count in (2, 3, 8, 16):
        set_threads(count)
        found = outputs_and_grads(op, inputs, T)
        torch.testing.assert_close(found, expected, **tolerance)
        assert all(map(torch.equal, found, outputs_and_grads(op, inputs, T)))


@pytest.mark.parametrize("per_replica", [False, True])
@pytest.mark.parametrize("T", [2, 3, 5, 7, 8, 15, 16])  # 7 and 15: fewer than threads
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_number_of_threads(dtype, T, per_replica, set_threads):
    """Threads take whole replicas where they come out even, else they share each."""
    check_threads(set_threads, call, draw_all(dtype, per_replica, T), T)


@pytest.mark.parametrize("per_replica", [False, True])
@pytest.mark.parametrize("needed", [(0,), (1, 2), (0, 3, 4), (3, 4)])
def test_some_gradients_by_any_number_of_threads(needed, per_replica, set_threads):
    inputs = draw_all(torch.float32, per_replica, 7)
    inputs = [t.detach().requires_grad_(i in needed) for i, t in enumerate(inputs)]
    check_threads(set_threads, call, inputs, 7)


@pytest.mark.parametrize("T", [7, 16])
def test_with_the_divergence_by_any_number_of_threads(T, set_threads):
    check_threads(set_threads, call_with_kl, draw_all(torch.float32, False, T), T)


def test_a_share_of_the_rows_may_end_within_a_pair(set_threads):
    """Of narrow layers two rows are made at once."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 16), (5824, 16), (5824, 16), (5824,), (5824,)]
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    check_threads(set_threads, call, inputs, 2, rtol=1e-4, atol=1e-3)


def test_groups_of_replicas_by_any_number_of_threads(set_threads):
    """Of 16-bit activations 7 replicas go together, fewer than 8 threads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(140, 1024), (8, 1024), (8, 1024), (8,), (8,)]
    x, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [t.requires_grad_() for t in (x.bfloat16(), *weights)]
    check_threads(set_threads, call, inputs, 21, rtol=2**-7, atol=2**-7)


def test_many_rows_of_a_shared_input_are_held_once(set_threads):
    """Its gradient is a sum of each part, 20 MB here: they would exceed what parts may hold."""
    generator = torch.Generator().manual_seed(0)
    x, mu, rho = (
        torch.randn(shape, generator=generator) for shape in ((80000, 64), (1, 64), (1, 64))
    )
    seed = ops.new_seed(3)
    x.requires_grad_()

    def step():
        y = ops.bayes_linear(x, mu, rho, seed=seed, stream=1, num_samples=4)
        torch.autograd.grad(y.sum(), x)

    held = []
    for count in (1, 4):
        set_threads(count)
        held.append(peak_extra_bytes(step))
    assert held[1] <= held[0] + 4096


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("per_replica", [False, True])
def test_threads_in_inference_mode(mode, per_replica, set_threads):
    """torch's other threads know nothing of a mode; tensors that are made in it forbid much."""
    set_threads(2)
    expected = call(draw_all(torch.float32, per_replica, 4), 4)
    with mode():
        y = call(draw_all(torch.float32, per_replica, 4), 4)
        assert torch.equal(y, expected)
        assert y.is_inference() == (mode is torch.inference_mode)
