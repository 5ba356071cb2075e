"""Training steps by Bayes by Backprop, and its two estimators."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bnuq_ext import BayesLinear, data, elbo_loss, kl_divergence, replicas

from .bayes_yardsticks import ByHand
from .timing import DEVICES, FULL, compare, in_a_graph, record

pytestmark = pytest.mark.filterwarnings("default")

SIZES = (784, 400, 400, 10)


def mlp(layer, sizes=SIZES) -> nn.Sequential:
    pairs = list(zip(sizes, sizes[1:], strict=False))
    modules = [m for pair in pairs for m in (layer(*pair), nn.ReLU())]
    return nn.Sequential(*modules[:-1])


def floor(rows: int) -> str:
    """What a step has to do besides the work of the ordinary network."""
    weights = sum(a * b for a, b in zip(SIZES, SIZES[1:], strict=False))
    flops = 2 * rows * (3 * weights - SIZES[0] * SIZES[1])
    # Twice the noise; rho twice, its gradient and its update beside those of mu.
    return f"{flops / 1e9:.2f} GFLOP, {2 * weights / 1e6:.2f} M normals, {6 * 4 * weights / 1e6:.0f} MB"


def training_step(model, loss):
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step():
        optimiser.zero_grad()
        loss(model).backward()
        optimiser.step()

    return step


@pytest.mark.parametrize("device", DEVICES)
def test_training_step(benchmark, device):
    """784-400-400-10, 128 rows, one sample, Gaussian prior and SGD included."""
    torch.manual_seed(0)
    x = torch.randn(128, SIZES[0], device=device)
    y = torch.randint(0, SIZES[-1], (128,), device=device)
    model, plain = mlp(BayesLinear).to(device), mlp(nn.Linear).to(device)
    parts = elbo_loss(model, x, y, batch_weight=0.01, seed=0)
    expected = parts.nll + 0.01 * kl_divergence(model) / 128
    torch.testing.assert_close(parts.loss, expected, rtol=1e-4, atol=1e-4)
    cases = {
        "ours": training_step(model, lambda m: elbo_loss(m, x, y, batch_weight=0.01).loss),
        "ordinary network": training_step(plain, lambda m: F.cross_entropy(m(x), y)),
    }
    times = compare(cases, rounds=51, sample_ms=20, seconds=10 if FULL else 3, device=device)
    label = f"step of {'-'.join(map(str, SIZES))}, floor {floor(128)}"
    record(benchmark, label, times, target={"ordinary network": 0.5})
    benchmark.pedantic(cases["ours"], rounds=3)


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
def test_training_step_in_a_cuda_graph(benchmark):
    """At most 1.25 times the step of the ordinary network,
    both without the time to launch kernels."""
    torch.manual_seed(0)
    x, y = torch.randn(128, SIZES[0], device="cuda"), torch.randint(0, 10, (128,), device="cuda")
    model, plain = mlp(BayesLinear).cuda(), mlp(nn.Linear).cuda()
    cases = {
        "ours": in_a_graph(
            training_step(model, lambda m: elbo_loss(m, x, y, batch_weight=0.01).loss)
        ),
        "ordinary network": in_a_graph(training_step(plain, lambda m: F.cross_entropy(m(x), y))),
    }
    times = compare(cases, rounds=51, sample_ms=20, seconds=10, device="cuda")
    label = f"step of {'-'.join(map(str, SIZES))} in a CUDA graph"
    record(benchmark, label, times, target={"ordinary network": 0.8})
    benchmark.pedantic(cases["ours"], rounds=3)


SMALL = (13, 50, 1)


def divergence_by_hand(model) -> torch.Tensor:
    return sum(layer.kl_divergence() for layer in model if isinstance(layer, ByHand))


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("T", [1, 10])
def test_small_training_step(benchmark, T):
    """Of a small regression, 32 rows, where calls take longer than what they compute."""
    torch.manual_seed(0)
    x, y = torch.randn(32, SMALL[0]), torch.randn(32, 1)
    model, by_hand, plain = (mlp(layer, SMALL) for layer in (BayesLinear, ByHand, nn.Linear))
    by_hand.load_state_dict(model.state_dict())
    by_hand(x)
    torch.testing.assert_close(divergence_by_hand(by_hand), kl_divergence(model))
    options = {"num_samples": T, "likelihood": "gaussian", "batch_weight": 0.01}
    nll = elbo_loss(model, x, y, seed=0, **options).nll
    with replicas(model, T, seed=0):
        residuals = model(x).unflatten(0, (T, -1)) - y
    torch.testing.assert_close(nll, (residuals.square() + math.log(2 * math.pi)).mean() / 2)

    def step_by_hand(model):
        nll = sum(F.mse_loss(model(x), y) for _ in range(T)) / (2 * T)
        return nll + 0.01 * divergence_by_hand(model) / len(x)

    cases = {
        "ours": training_step(model, lambda m: elbo_loss(m, x, y, **options).loss),
        "plain PyTorch": training_step(by_hand, step_by_hand),
        "ordinary network": training_step(plain, lambda m: F.mse_loss(m(x), y)),
    }
    times = compare(cases, rounds=51, sample_ms=20, seconds=10)
    label = f"step of {'-'.join(map(str, SMALL))}, 32 rows, T={T}"
    record(benchmark, label, times, target={"plain PyTorch": 1.0})
    benchmark.pedantic(cases["ours"], rounds=3)


class Residual(nn.Module):
    """784-400-400-10 with a way past the second layer: no `nn.Sequential`, whose samples go together
    without a trial."""

    def __init__(self):
        super().__init__()
        pairs = zip(SIZES, SIZES[1:], strict=False)
        self.first, self.second, self.head = (BayesLinear(*pair) for pair in pairs)

    def forward(self, x):
        h = self.first(x).relu()
        return self.head(h + self.second(h).relu())


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("rows,T", [(16, 10), (128, 4), (128, 10)])
@pytest.mark.parametrize("device", DEVICES)
def test_samples_together(benchmark, device, rows, T):
    """A step with T samples as one batch, a sample alone held to them in each step."""
    torch.manual_seed(0)
    x = torch.randn(rows, SIZES[0], device=device)
    y = torch.randint(0, SIZES[-1], (rows,), device=device)
    model = Residual().to(device)

    def one_after_another(model):
        nll = sum(F.cross_entropy(model(x), y) for _ in range(T)) / T
        return nll + 0.01 * kl_divergence(model) / rows

    cases = {
        "ours": training_step(
            model, lambda m: elbo_loss(m, x, y, num_samples=T, batch_weight=0.01).loss
        ),
        "one after another": training_step(model, one_after_another),
    }
    times = compare(cases, rounds=51, sample_ms=20, seconds=10, device=device)
    label = f"step of a residual {'-'.join(map(str, SIZES))}, {rows} rows, T={T}"
    record(benchmark, label, times, target={"one after another": 1.0})
    benchmark.pedantic(cases["ours"], rounds=3)


# ---- exact or local -----------------------------------------------------------------------------


def gradient_variance(model, x, y, draws: int) -> tuple[float, float, float]:
    """(summed variance of the gradients by means and by spreads over fresh samples, seconds of one
    gradient)."""
    parameters, seconds = dict(model.named_parameters()), []
    total = {name: 0.0 for name in parameters}
    squares = dict(total)
    for _ in range(draws):
        start = time.perf_counter()
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), parameters.values())
        seconds.append(time.perf_counter() - start)
        for name, grad in zip(parameters, grads, strict=True):
            total[name] += grad.double()
            squares[name] += grad.double().square()
    found = {k: float((squares[k] - total[k].square() / draws).sum()) / (draws - 1) for k in total}
    by_mu, by_rho = (sum(v for k, v in found.items() if k.endswith(end)) for end in ("mu", "rho"))
    return by_mu, by_rho, sorted(seconds)[draws // 2]


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("rho", [-5.0, -3.0, -1.0])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_estimators(benchmark, rows, rho):
    """Variance of the gradients of "exact" and "local", and their time: what a budget buys."""
    train, *_ = data.digits()
    x, y = train.x[:rows], train.y[:rows]
    found = {}
    for estimator in ("exact", "local"):
        torch.manual_seed(0)
        options = {"estimator": estimator, "rho_init": rho}
        layers = BayesLinear(64, 100, **options), nn.ReLU(), BayesLinear(100, 10, **options)
        found[estimator] = gradient_variance(nn.Sequential(*layers), x, y, 400)
    exact, local = found["exact"], found["local"]
    by_mu, by_rho, time_ratio = (a / b for a, b in zip(exact, local, strict=True))
    case = f"exact over local, 64-100-10, rho {rho:g}, {rows} rows: variance by mu {by_mu:.2f}x, "
    case += f"by rho {by_rho:.1f}x, time {time_ratio:.2f}x"
    print(case)
    benchmark.extra_info.update(case=case, ours_ms=1e3 * exact[-1])
    benchmark.pedantic(lambda: None, rounds=1)
