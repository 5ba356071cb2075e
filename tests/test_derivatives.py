"""Derivatives that the kernels have no rule for: second ones, forward-mode ones, and those of
torch.func."""

import math

import pytest
import torch
from batch_norm_cases import OPS, call, make
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian

from bnuq_ext import ops
from bnuq_ext.ops.batch_norm import batch_norm_snapshots
from bnuq_ext.ops.kl import gaussian_kl_sum
from bnuq_ext.ops.linear_chain import Link, bayes_linear_chain

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: it imports what it has deprecated
T = 2


def seed(device):
    return ops.new_seed(3, 1, device)


def posterior(O, I=None, device="cpu"):  # noqa: E741
    """mu and rho."""
    shape = (O,) if I is None else (O, I)
    return [torch.randn(shape, dtype=torch.float64, device=device) for _ in range(2)]


def of_batch_norm(op, activation, shared, device):
    tensors = make(op, (2, 3, 2, 2), T, shared=shared, device=device)

    def run(*values):
        given = dict(zip(tensors, values, strict=True))
        return call(op, given, T, activation=activation, slope=0.3, shared=shared)

    return run, list(tensors.values())


def of_linear(shared, bias, device):
    x = torch.randn(*([] if shared else [T]), 3, 4, dtype=torch.float64, device=device)
    weights = posterior(5, 4, device) + (posterior(5, device=device) if bias else [])

    def run(*values):
        return ops.bayes_linear(*values, seed=seed(device), stream=1, num_samples=T)

    return run, [x, *weights]


def of_chain(device):  # which is the CPU's alone
    tensors = posterior(5, 4) + posterior(5) + posterior(2, 5)

    def run(x, *values):
        links = [Link(values[:4], 0.7, 1, True), Link(values[4:], 1.3, 2)]
        return bayes_linear_chain(x, links, seed=seed("cpu"), num_samples=T)

    return run, [torch.randn(3, 4, dtype=torch.float64), *tensors]


def of_divergence(function, *shape):
    return lambda device: (
        lambda *values: function(device, *values),
        posterior(*shape, device=device),
    )


def divergence_of_two(device, mu, rho):
    return gaussian_kl_sum([(mu, rho, 0.7), (rho.T, mu.T, 1.3)])


def of_statistics(device):
    logits = torch.randn(3, 2, 4, 2, dtype=torch.float64, device=device)
    return lambda logits: tuple(ops.predictive_statistics(logits)), [logits]


CASES = {
    **{
        f"{op} {activation} {shared=}": lambda device, given=(op, activation, shared): (
            of_batch_norm(*given, device)
        )
        for op in OPS
        for activation, shared in (("none", True), ("relu", False), ("leaky_relu", True))
    },
    **{
        f"linear {shared=} {bias=}": lambda device, given=(shared, bias): of_linear(*given, device)
        for shared in (False, True)
        for bias in (False, True)
    },
    "chain": of_chain,
    "gaussian": of_divergence(lambda device, mu, rho: ops.gaussian_kl(mu, rho, 0.7), 3, 4),
    "gaussians": of_divergence(divergence_of_two, 3, 4),
    "mixture": of_divergence(
        lambda device, *values: ops.mixture_kl(*values, seed(device), 1, 3, std2=0.3), 3, 4
    ),
    "mixture of a bias": of_divergence(
        lambda device, *values: ops.mixture_kl(*values, seed(device), 1, pi=1.0), 3
    ),
    "statistics": of_statistics,
}


@pytest.fixture(params=CASES)
def case(request, device):
    torch.manual_seed(0)
    return CASES[request.param](device)


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def total(function):
    """A number that weighs all results of the function otherwise."""

    def weighed(*values):
        found = function(*values)
        found = found if isinstance(found, tuple) else (found,)
        return sum((part * (1 + part.square()).log()).sum() for part in found)

    return weighed


def test_second_derivatives(case):
    function, tensors = case
    assert torch.autograd.gradgradcheck(function, leaves(tensors), check_batched_grad=True)


def test_first_derivatives_in_a_batch(case):
    function, tensors = case
    assert torch.autograd.gradcheck(
        function, leaves(tensors), check_batched_grad=True, check_batched_forward_grad=True,
        check_forward_ad=True,
    )  # fmt: skip


def test_gradients_that_are_differentiated_again_are_the_kernels(case):
    function, tensors = case
    given = leaves(tensors)
    expected = torch.autograd.grad(total(function)(*given), given)
    found = torch.autograd.grad(total(function)(*given), given, create_graph=True)
    torch.testing.assert_close(found, expected)
    for one, grad in zip(given, expected, strict=True):  # each alone: what others need is not there
        for other in given:
            other.requires_grad_(other is one)
        (found,) = torch.autograd.grad(total(function)(*given), one, create_graph=True)
        torch.testing.assert_close(found, grad)


def test_derivatives_by_torch_func(case):
    function, tensors = case
    loss, places = total(function), tuple(range(len(tensors)))
    given = leaves(tensors)
    value = loss(*given)
    expected = torch.autograd.grad(value, given)
    torch.testing.assert_close(torch.func.grad(loss, places)(*tensors), expected)
    torch.testing.assert_close(torch.func.jacrev(loss, places)(*tensors), expected)
    torch.testing.assert_close(torch.func.jacfwd(loss, places)(*tensors), expected)
    found, _ = torch.func.vjp(loss, *tensors)
    torch.testing.assert_close(found, value.detach())
    batched = [torch.stack([t, t]) for t in tensors]
    for found in (
        torch.func.vmap(torch.func.grad(loss, places))(*batched),
        torch.func.grad(lambda *values: torch.func.vmap(loss)(*values).sum(), places)(*batched),
    ):
        torch.testing.assert_close(found, tuple(torch.stack([g, g]) for g in expected))


def test_hessians(case):
    function, tensors = case

    def loss(first):
        return total(function)(first, *tensors[1:])

    expected = hessian(loss, tensors[0])
    torch.testing.assert_close(hessian(loss, tensors[0], vectorize=True), expected)
    torch.testing.assert_close(torch.func.hessian(loss)(tensors[0]), expected)


def test_gradients_of_a_batch_that_are_differentiated_again(case):
    function, tensors = case

    def penalty(vectorize):
        given = tuple(leaves(tensors))
        jacobians = jacobian(function, given, create_graph=True, vectorize=vectorize)
        jacobians = jacobians if isinstance(jacobians[0], tuple) else (jacobians,)
        size = sum(part.square().sum() for parts in jacobians for part in parts)
        return torch.autograd.grad(size, given, materialize_grads=True)

    torch.testing.assert_close(penalty(True), penalty(False))


def test_tangents(case):
    """Of each tensor alone; torch would hand back 0."""
    function, tensors = case
    for place in range(len(tensors)):

        def one(value, place=place):
            return total(function)(*tensors[:place], value, *tensors[place + 1 :])

        tangent = torch.randn_like(tensors[place])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensors[place], tangent)
            found = forward_ad.unpack_dual(one(dual)).tangent
            assert forward_ad.unpack_dual(one(tensors[place])).tangent is None
        torch.testing.assert_close(found, (jacobian(one, tensors[place]) * tangent).sum())


def test_tangents_of_gradients(case):
    """A backward is linear in what it is given."""
    function, tensors = case
    given = leaves(tensors)
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    grads = [torch.randn_like(y) for y in results]
    expected = torch.autograd.grad(results, given, grads, retain_graph=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(grad, 2 * grad) for grad in grads]
        for found, grad in zip(torch.autograd.grad(results, given, duals), expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, 2 * grad)


def check_tangents_of_an_outer_transform(loss, value, wrap):
    one, tangent = torch.ones((), dtype=torch.float64), torch.randn_like(value)

    def in_jvp(value):
        return torch.func.jvp(lambda factor: loss(value) * factor, (one,), (one,))[1]

    def in_grad_of_a_constant(value):
        return torch.func.grad(lambda factor: torch.no_grad()(loss)(value) * factor)(one)

    def in_vmap(value):
        return torch.func.vmap(loss)(value[None]).sum()

    expected = (jacobian(loss, value) * tangent).sum()
    for nested in (in_jvp, in_grad_of_a_constant, in_vmap):

        def along(value, tangent, nested=nested):
            return torch.func.jvp(nested, (value,), (tangent,))[1]

        torch.testing.assert_close(wrap(along)(value, tangent), expected)


def test_tangents_of_an_outer_transform(case):
    """torch tells of those of the innermost alone, and of none inside vmap."""
    function, (first, *others) = case
    check_tangents_of_an_outer_transform(
        lambda value: total(function)(value, *others), first, lambda along: along
    )


def test_tangents_of_an_outer_transform_in_what_is_compiled():
    mu, rho = posterior(3, 4)
    check_tangents_of_an_outer_transform(
        lambda mu: ops.gaussian_kl(mu, rho), mu, lambda along: torch.compile(along, backend="eager")
    )


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_tangents_through_what_layers_call(name):
    bank = make("bank", (2, 3), 1)
    given = {name: bank[name] for name in ("x", "mean", "var", "weight", "bias")}
    options = dict(snapshot=torch.tensor([2]), eps=0.1, shared=False)

    def run(value, **more):
        return batch_norm_snapshots(**given | {name: value}, **options, **more)

    expected = jacobian(run, given[name]).flatten(2).sum(-1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        for out in (None, torch.empty(2, 3, dtype=torch.float64)):
            found = forward_ad.unpack_dual(run(dual, out=out))
            torch.testing.assert_close(found.tangent, expected)
            torch.testing.assert_close(found.primal, run(given[name]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_of_16_bits(op, dtype):
    """The gradient's norm, as a penalty has it, and its own gradient."""
    tensors = make(op, (8, 3, 4, 4), T, dtype=dtype)

    def penalty(given):
        names = list(given)
        y = call(op, given, T, activation="relu").double().square().mean()
        grads = torch.autograd.grad(y, [given[name] for name in names], create_graph=True)
        loss = sum(grad.double().square().mean() for grad in grads)
        return grads, torch.autograd.grad(loss, [given[name] for name in names])

    found = penalty({name: t.clone().requires_grad_() for name, t in tensors.items()})
    exact = penalty({name: t.double().requires_grad_() for name, t in tensors.items()})
    for parts, expected in zip(found, exact, strict=True):
        for part, number in zip(parts, expected, strict=True):
            size = number.abs().max()
            torch.testing.assert_close(part.double() / size, number / size, rtol=0, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergences_of_tiny_spreads_and_pruned_weights(dtype):
    """sigma underflows, and of a pruned weight there is none; log sigma is rho there."""
    mu = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    rho = torch.tensor([-300.0, -1.0, -math.inf], dtype=dtype, requires_grad=True)
    for divergence in (
        ops.gaussian_kl(mu, rho),
        gaussian_kl_sum([(mu, rho, 1.0)]),
        ops.mixture_kl(mu, rho, 0, 0, 4),
    ):
        expected = torch.autograd.grad(divergence, (mu, rho), retain_graph=True)
        grads = torch.autograd.grad(divergence, (mu, rho), create_graph=True)
        torch.testing.assert_close(grads, expected)
        second = torch.autograd.grad(grads[0].sum() + grads[1].sum(), (mu, rho))
        assert all(t.isfinite().all() for t in second)
        assert second[0][0] > 0 and not any(t[2] for t in (*grads, *second))
        assert abs(second[1][0]) < 1e-30 and second[1][1] != 0


def test_divergences_where_the_logarithm_of_sigma_becomes_rho():
    mu, rho = torch.zeros(3), torch.tensor([-41.0, -40.0, -39.0])
    for divergence in (ops.gaussian_kl, lambda mu, rho: ops.mixture_kl(mu, rho, 0, 0)):
        grad = torch.func.grad(divergence, 1)(mu, rho)
        torch.testing.assert_close(grad, torch.full((3,), -1.0))


@pytest.mark.parametrize("statistic", ["mean", "variance", "entropy", "expected_entropy"])
def test_impossible_classes(statistic, device):
    logits = torch.randn(3, 2, 4, dtype=torch.float64, device=device)
    logits[:, :, 1] = -math.inf
    logits.requires_grad_()
    found = getattr(ops.predictive_statistics(logits), statistic)
    (grad,) = torch.autograd.grad(found.square().sum(), logits, create_graph=True)
    grad.square().sum().backward()
    assert logits.grad.isfinite().all() and logits.grad.any() and not logits.grad[:, :, 1].any()


def test_snapshots_outside_of_the_bank(device):
    """As in the kernel NaN, where their values are not looked at."""
    t = make("bank", (2, 3), 2, device=device)

    def loss(x, snapshot):
        return ops.batch_norm_bank(x, t["mean"], t["var"], snapshot=snapshot).square()

    snapshots = torch.tensor([[0, 3], [-1, 2]], device=device)
    jacobians = torch.func.vmap(torch.func.jacrev(loss), in_dims=(None, 0))(t["x"], snapshots)
    diagonal = jacobians.flatten(1, 2).flatten(2).diagonal(dim1=1, dim2=2)
    expected = [[False] * 6 + [True] * 6, [True] * 6 + [False] * 6]
    assert diagonal.isnan().tolist() == expected


def test_values_beside_tangents_are_the_kernels(case):
    function, tensors = case
    found, _ = torch.func.jvp(function, tuple(tensors), tuple(tensors))
    torch.testing.assert_close(found, function(*tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tangents_of_16_bits(dtype):
    """Of numbers in float32, rounded at the end."""
    weights = [t.float() for t in posterior(5, 4) + posterior(5)]
    bank, noise = make("bank", (3, 4), T, dtype=dtype), dict(stream=1, num_samples=T)

    def linear(x):
        return ops.bayes_linear(x, *weights, seed=seed("cpu"), **noise)

    def batch_norm(x):
        return call("bank", bank | {"x": x, "residual": bank["residual"].to(x.dtype)}, T)

    def entropy(x):
        return ops.predictive_statistics(x.expand(T, 6, 4)).entropy

    x, tangent = (torch.randn(6, 4).to(dtype) for _ in range(2))
    for function in (linear, batch_norm, entropy):
        found = torch.func.jvp(function, (x,), (tangent,))
        exact = torch.func.jvp(function, (x.float(),), (tangent.float(),))
        for part, number in zip(found, exact, strict=True):
            torch.testing.assert_close(part, number.to(function(x).dtype))


def test_sums_of_16_bits_that_are_differentiated_again():
    """Over more rows than float16 counts."""
    one, rows = torch.ones(1, 1), 4099
    bias = torch.zeros(1, requires_grad=True)
    y = ops.batch_norm_bank(torch.ones(rows, 1).half(), one, one, seed=0, num_samples=1, bias=bias)
    (grad,) = torch.autograd.grad(y, bias, torch.ones_like(y), create_graph=True)
    assert grad.item() == rows


def test_tangents_of_the_gradient_of_a_chains_divergence():
    """Whose outputs have none."""
    function, tensors = of_chain("cpu")
    given, one = leaves(tensors), torch.ones((), dtype=torch.float64)
    _, divergence = function(*given)
    expected = torch.autograd.grad(divergence, given[1:], retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(one, 2 * one)
        found = torch.autograd.grad(divergence, given[1:], dual)
        tangents = [forward_ad.unpack_dual(grad).tangent for grad in found]
    torch.testing.assert_close(tangents, [2 * grad for grad in expected])
