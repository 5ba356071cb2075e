"""Below the Python checks: registered ops refuse what they would read outside of a tensor."""

import pytest
import torch

from bnuq_ext import ops

torch_ops = torch.ops.bnuq
SEED = ops.new_seed(0)
N, I, O, T = 6, 20, 32, 2  # noqa: E741


def normal(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def forward(bias_mu, bias_rho, rows=N):
    mu, rho = normal(O, I), normal(O, I)
    return torch_ops.bayes_linear(normal(rows, I), mu, rho, bias_mu, bias_rho, SEED, 0, T)


def backward(bias_rho, need_bias=True, rows=N):
    grad_y, x, mu, rho = normal(T, rows, O), normal(rows, I), normal(O, I), normal(O, I)
    needs = (True, True, need_bias)
    return torch_ops.bayes_linear_backward(grad_y, x, mu, rho, bias_rho, SEED, 0, T, *needs)


@pytest.mark.parametrize("rows", [1, N])
def test_a_bias_fits_its_weights(rows):
    entries = "bayes_linear: "
    for halves in ((normal(2), normal(2)), (normal(O), normal(O - 1)), (normal(0), normal(O))):
        with pytest.raises(RuntimeError, match=entries):
            forward(*halves, rows=rows)
    with pytest.raises(RuntimeError, match="a bias must have both halves"):
        forward(normal(O), None, rows)
    for need in (True, False):
        with pytest.raises(RuntimeError, match=entries):
            backward(normal(2), need, rows)
    with pytest.raises(RuntimeError, match="bias_rho is needed for its gradient"):
        backward(None, rows=rows)
    assert forward(normal(O), normal(O), rows).shape == (T, rows, O)
    assert backward(normal(O), rows=rows)[4].shape == (O,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_backward_of_batch_norm_takes_x_in_the_dtype_of_the_gradient(dtype):
    mean, var, snapshot = normal(1, 3), normal(1, 3), torch.zeros(1, dtype=torch.int64)

    def run(x):
        statistics = (mean, var, None, snapshot, 1, None, 1e-5, 1.0)
        needs = (False, True, True, True)
        return torch_ops.batch_norm_bank_backward(normal(4, 3), x, None, *statistics, *needs)

    with pytest.raises(RuntimeError, match="x must fit grad_y"):
        run(normal(4, 3, dtype=dtype))
    with pytest.raises(RuntimeError, match="x must fit grad_y"):
        run(normal(5, 3))
    assert run(normal(4, 3))[0].shape == (4, 3)


def test_lists_of_a_divergence_are_equally_long():
    two = [normal(3), normal(3)]
    for mu, rho, stds in ((two, two, [1.0]), (two, two[:1], [1.0, 1.0]), ([], [], [])):
        with pytest.raises((RuntimeError, IndexError)):
            torch_ops.gaussian_kl_sum(mu, rho, stds)
    with pytest.raises((RuntimeError, IndexError)):
        torch_ops.gaussian_kl_sum_backward(normal(), two, two, [1.0])


@pytest.mark.parametrize("num_samples", [2**62, 2**63 - 1])
def test_replicas_beyond_all_integers_are_refused(num_samples):
    x, params = normal(4, 4), normal(4, 4)
    with pytest.raises(RuntimeError, match="num_samples times the rows of x must fit into 63 bits"):
        ops.batch_norm_fitted(x, params, SEED, 0, num_samples, "lognormal", shared=True)
    with pytest.raises(RuntimeError, match="not enough memory for a result of 2.76701e.19 numbers"):
        ops.batch_norm_fitted(x[:1], params, SEED, 0, 2**62 + 2**61, "normal", shared=True)
    with pytest.raises(RuntimeError, match="num_samples must fit into 63 bits with the weights"):
        ops.mixture_kl(normal(64, 4), normal(64, 4), SEED, 0, num_samples=num_samples)


def test_a_result_beyond_all_integers_is_counted_as_it_is():
    """2^62 samples of 4 rows of 4 outputs are 2^66 numbers, which 64 bits count as none."""
    noise = dict(seed=SEED, stream=0, num_samples=2**62)
    with pytest.raises(
        RuntimeError, match=r"not enough memory for a result of 7.3787e\+19 numbers"
    ):
        ops.bayes_linear(normal(4, 2), normal(4, 2), normal(4, 2), **noise)


def test_a_divergence_has_one_gradient():
    mu, rho, none = normal(3, 2), normal(3, 2), normal(0)
    for call in (
        lambda: torch_ops.gaussian_kl_backward(none, mu, rho, 1.0),
        lambda: torch_ops.gaussian_kl_sum_backward(none, [mu], [rho], [1.0]),
        lambda: torch_ops.mixture_kl_backward(none, mu, rho, SEED, 0, 1, 0.5, 1.0, 0.1),
    ):
        with pytest.raises(RuntimeError, match="grad must be a single number"):
            call()
