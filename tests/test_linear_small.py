"""bayes_linear of small layers on the CPU, several of whose replicas are multiplied at once, against
plain PyTorch fed with its noise."""

import pytest
import torch
from drawn import layer_noise

from bnuq_ext import ops, reference

# Rows, features in and out, replicas: of 50, 24 and 128 at once, and of the last all; ends of fewer.
SIZES = [(32, 13, 50, 103), (8, 40, 33, 61), (6, 16, 16, 300), (9, 3, 2, 1000)]


def make(N, I, O, T, shared, dtype):  # noqa: E741
    generator = torch.Generator().manual_seed(N + T)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    x = draw(N, I) if shared else draw(T, N, I)
    return [x, draw(O, I), draw(O, I) - 2, draw(O), draw(O)]


def run(inputs, T):
    return ops.bayes_linear(*inputs, seed=ops.new_seed(5, 70), stream=3, num_samples=T)


def expect(inputs, T):
    noise = layer_noise(ops.new_seed(5, 70), 3, T, *inputs[1].shape)
    return reference.bayes_linear(*inputs, *noise)


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_reference(sizes, dtype, threads, shared, needs_x, set_threads):
    set_threads(threads)
    inputs = make(*sizes, shared, dtype)
    asked = inputs if needs_x else inputs[1:]
    inputs64 = [t.double() for t in inputs]
    for t in (*asked, *inputs64):
        t.requires_grad_()
    y, expected = run(inputs, sizes[-1]), expect(inputs64, sizes[-1])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = y, *torch.autograd.grad(y, asked, grad)
    right = expected, *torch.autograd.grad(expected, inputs64, grad.double())[not needs_x :]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    for actual, wanted in zip(found, right, strict=True):
        error = (actual.double() - wanted).abs().max()
        assert error <= tolerance * sizes[-1] ** 0.5 * wanted.abs().max()


@pytest.mark.parametrize("sizes", [(8, 0, 5, 7), (8, 5, 0, 7), (0, 5, 4, 7)], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_where_a_size_is_0(sizes, shared):
    inputs = [t.requires_grad_() for t in make(*sizes, shared, torch.float64)]
    y, expected = run(inputs, 7), expect(inputs, 7)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), inputs))


def test_noise_does_not_depend_on_where_a_thread_begins(set_threads):
    """Rows of at most 16 numbers are drawn by fours, which threads may part."""
    mu = torch.zeros(20_000, 16)
    inputs = [torch.eye(16), mu, mu, None, None]
    results = []
    for threads in (1, 7):
        set_threads(threads)
        results.append(run(inputs, 1))
    assert torch.equal(*results)
