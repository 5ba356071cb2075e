"""Below the Python checks: registered ops refuse what they would read outside of a tensor."""

import re

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


def batch_norm(out=None, **changes):
    given = {"x": normal(4, 3), "mean": normal(1, 3), "var": normal(1, 3), "seed": None}
    given |= {"snapshot": INDICES, "num_samples": 2, "weight": None, "bias": None, "residual": None}
    values = (given | changes).values()
    if out is not None:
        return torch_ops.batch_norm_bank_out(out, *values, 1e-5, 1.0, False)
    return torch_ops.batch_norm_bank(*values, 1e-5, 1.0, False)


def batch_norm_backward(**changes):
    given = {
        "x": normal(4, 3),
        "y": normal(4, 3),
        "mean": normal(1, 3),
        "var": normal(1, 3),
    } | changes
    rest = None, INDICES, 2, None, 1e-5, 0.0, False, True, True, True
    return torch_ops.batch_norm_bank_backward(normal(4, 3), *given.values(), *rest)


def fitted_backward(**changes):
    given = {"x": normal(4, 3), "y": None, "params": normal(4, 3), "seed": SEED} | changes
    rest = 0, 0, 2, None, 1e-5, 1.0, False, True, False, True
    torch_ops.batch_norm_fitted_backward(normal(4, 3), *given.values(), *rest)


def accumulate(**changes):
    state = {"mean": normal(2, 3), "m2": normal(2, 3), "entropy": normal(2)} | changes
    torch_ops.predictive_accumulate_(*state.values(), normal(4, 2, 3), 0)


def statistics_backward(mean=None, **grads):
    names = "grad_mean", "grad_variance", "grad_entropy", "grad_expected_entropy"
    mean = normal(2, 3) if mean is None else mean
    torch_ops.predictive_statistics_backward(normal(4, 2, 3), mean, *map(grads.get, names))


def layer(**changes):
    given = {"x": normal(N, I), "mu": W, "rho": W, "bias_mu": None, "bias_rho": None, "seed": SEED}
    torch_ops.bayes_linear(*(given | {"stream": 0, "num_samples": T} | changes).values())


def layer_kl(mu, rho):
    torch_ops.bayes_linear_kl(normal(N, I), mu, rho, SEED, 0, T, 1.0)


def layer_kl_backward(grad_kl, need_bias):
    weights = normal(N, I), [W], [W], SEED, 0, T, 1.0
    torch_ops.bayes_linear_kl_backward(normal(T, N, O), grad_kl, *weights, True, True, need_bias)


INDICES = torch.zeros(2, dtype=torch.int64)
W, BIAS, DOUBLE, STRIDED = normal(O, I), normal(O), torch.float64, normal(1, 6)[:, ::2]
REFUSED = [
    (batch_norm, "parameters and statistics must be contiguous", [
        {"mean": STRIDED}, {"var": normal(1, 3, dtype=DOUBLE)}, {"var": normal(2, 3)},
        {"weight": normal(2)}, {"bias": normal(2)},
    ]),
    (batch_norm, "the bank must not be empty", [
        {"mean": normal(0, 3), "var": normal(0, 3)} | rows
        for rows in ({}, {"seed": SEED, "snapshot": None})
    ]),
    (batch_norm, "give seed or snapshot", [{"snapshot": None}, {"seed": SEED}]),
    (batch_norm, "snapshot must be int64", [
        {"snapshot": indices} for indices in (INDICES[:1], INDICES.int(), INDICES.repeat(2)[::2])
    ]),
    (batch_norm, "seed must be int64", [
        {"seed": seed, "snapshot": None} for seed in (SEED.int(), SEED[:1], SEED.repeat(2)[::2])
    ]),
    (batch_norm, "residual must be like x", [
        {"residual": normal(2, 3)}, {"residual": normal(4, 3, dtype=DOUBLE)},
    ]),
    (batch_norm, "out must have the shape", [
        {"out": out} for out in (normal(2, 3), normal(3, 4).t(), normal(4, 3, dtype=DOUBLE))
    ]),
    (batch_norm, "x must have 2 dimensions", [{"x": normal(4)}]),
    (batch_norm, "x must have T * N rows", [{"x": normal(5, 3)}]),
    (fitted_backward, "parameters and statistics must be contiguous", [
        {"params": params}
        for params in (normal(4, 2), normal(4, 3, dtype=DOUBLE), normal(4, 6)[:, ::2])
    ]),
    (fitted_backward, "seed must be int64", [{"seed": SEED[:1]}]),
    (batch_norm_backward, "x must be given for the sums", [{"x": None}]),
    (batch_norm_backward, "y must be given for an activation", [{"y": None}]),
    (batch_norm_backward, "x must fit grad_y", [{"x": normal(3, 3)}]),
    (batch_norm_backward, "y must be like grad_y", [
        {"y": normal(2, 3)}, {"y": normal(4, 3, dtype=DOUBLE)},
    ]),
    (torch_ops.predictive_statistics, "at least 3 dimensions", [{"logits": normal(2, 3)}]),
    (torch_ops.predictive_statistics, "at least one replica", [{"logits": normal(0, 2, 3)}]),
    (accumulate, "the state must be contiguous", [
        {"mean": normal(3, 2).t()}, {"m2": normal(2, 3, dtype=DOUBLE)}, {"m2": normal(2, 2)},
        {"entropy": normal(1)},
    ]),
    (statistics_backward, "a gradient must be like its result", [
        {"mean": normal(1, 3)}, {"grad_mean": normal(2, 3, dtype=DOUBLE)},
        {"grad_variance": normal(3)}, {"grad_entropy": normal(1)},
    ]),
    (layer, "bayes_linear: num_samples must be at least 1", [{"num_samples": 0}]),
    (layer, "bayes_linear: x, mu and rho must match", [
        {"x": normal(N, I - 1)}, {"x": normal(T + 1, N, I)}, {"rho": normal(O - 1, I)},
    ]),
    (layer_kl, "those of a matrix and of a bias", [
        {"mu": [W, BIAS, BIAS], "rho": [W, BIAS, BIAS]}, {"mu": [W, BIAS], "rho": [W]},
        {"mu": [normal(I)], "rho": [normal(I)]}, {"mu": [W, BIAS[1:]], "rho": [W, BIAS]},
        {"mu": [W, BIAS], "rho": [W, BIAS[1:]]}, {"mu": [W], "rho": [W, BIAS]},
    ]),
    (layer_kl_backward, "grad_kl must be a scalar", [{"grad_kl": normal(2), "need_bias": False}]),
    (layer_kl_backward, "a bias be there", [{"grad_kl": normal(), "need_bias": True}]),
    (torch_ops.linear, "x must have the features", [
        {"x": normal(N, I - 1), "weight": W, "bias": None},
        {"x": normal(2, N, I), "weight": normal(O, N), "bias": None},
    ]),
    (torch_ops.gaussian_kl, "contiguous and alike", [
        {"mu": mu, "rho": rho, "prior_std": 1.0}
        for mu, rho in ((STRIDED, STRIDED), (W, BIAS), (W, W.double()))
    ]),
    (torch_ops.gaussian_kl, "must be float32 or float64", [
        {"mu": W.half(), "rho": W.half(), "prior_std": 1.0}
    ]),
    (torch_ops.philox_normal, "shape must have 2 or 3", [
        {"seed": SEED, "stream": 0, "tag": 0, "shape": [4]}
    ]),
    (torch_ops.snapshot_indices, "must be positive", [
        {"seed": SEED, "num_snapshots": 0, "num_samples": 2}
    ]),
]  # fmt: skip


@pytest.mark.parametrize("op, message, changes", REFUSED)
def test_what_would_be_read_outside_is_refused(op, message, changes):
    for change in changes:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            op(**change)


def test_a_gradient_has_the_rows_of_its_replicas():
    given = normal(T, N - 1, O), normal(N, I), W, W, None, SEED, 0, T
    with pytest.raises(RuntimeError, match="grad_y must have shape"):
        torch_ops.bayes_linear_backward(*given, True, True, False)
