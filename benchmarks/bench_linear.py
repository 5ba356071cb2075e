"""bayes_linear, a training step and the two estimators,
against plain PyTorch and other packages."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bnuq_ext import BayesLinear, data, elbo_loss, kl_divergence, ops
from bnuq_ext.ops.linear_ways import going

from . import bayes_yardsticks as yardsticks
from .bayes_yardsticks import Posterior
from .noise_floor import noise_alone
from .timing import DEVICES, FULL, compare, in_a_graph, record
from .yardsticks import why

pytestmark = pytest.mark.filterwarnings("default")

# features in, features out, rows, T, one x shared by the replicas
CASES = [(784, 400, 128, 10, True), (1024, 1024, 128, 10, not FULL)]
if FULL:
    CASES += [(784, 400, 128, 10, False), (1024, 1024, 128, 10, True)]
GRID = [
    (size, size, rows, T, True)
    for size in (400, 1024, 4096)
    for rows in (1, 8, 32, 128, 512)
    for T in (1, 4, 20, 100)
]
ONE_ROW = [(784, 400, 1, 100 if FULL else 20, False), (1024, 1024, 1, 100 if FULL else 20, False)]
ON = [("cpu", case) for case in CASES]
if "cuda" in DEVICES:
    ON += [("cuda", case) for case in (GRID if FULL else GRID[::7])]


def name_of(case) -> str:
    I, O, N, T, shared = case  # noqa: E741
    return f"{I}->{O} {N} rows T={T} {'shared' if shared else 'per replica'}"


def make(case, device, rho=-5.0):
    I, O, N, T, shared = case  # noqa: E741
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    q = Posterior(draw(O, I) / I**0.5, torch.full((O, I), rho), draw(O), torch.full((O,), rho))
    q = Posterior(*(p.to(device).requires_grad_() for p in q))
    return (draw(N, I) if shared else draw(T, N, I).requires_grad_()), q


def ours_of(x, q: Posterior, T: int):
    seed = ops.new_seed(0, 0, x.device)
    return lambda: ops.bayes_linear(x, *q, seed=seed, stream=0, num_samples=T)


def check_ours(case, device) -> None:
    """To 1e-3 of the largest: on CUDA the noise has 11 bits."""
    _, O, _, T, _ = case  # noqa: E741
    x, q = make(case, device)
    seed, few = ops.new_seed(0, 0, device), min(T, 3)
    y = ours_of(x, q, T)()[:few].detach()
    eps = ops.philox_normal(seed, 0, (few, *q.mu.shape))
    eps_bias = ops.philox_normal(seed, 0, (few, O), tag="bias")
    weight = (q.mu + F.softplus(q.rho) * eps).detach()
    bias = (q.bias_mu + F.softplus(q.bias_rho) * eps_bias).detach()
    xs = x.detach().expand(few, *x.shape) if x.dim() == 2 else x.detach()[:few]
    expected = torch.baddbmm(bias[:, None], xs, weight.transpose(1, 2))
    assert (y - expected).abs().max() < 1e-3 * expected.abs().max()


def checked(case, device, wanted) -> tuple[dict, dict]:
    """What runs of the yardsticks; those on our posterior give x @ mu^T + bias where sigma is 0."""
    T, runs, skipped = case[3], {}, {}
    x, q = make(case, device)
    x0, q0 = make(case, device, rho=-100.0)
    plain = torch.stack(yardsticks.linear(x0, q0, T)())
    for name, build in wanted.items():
        try:
            y = plain if name in yardsticks.PACKAGES else build(x0, q0, T)()
            run = build(x, q, T)
        except Exception as reason:
            skipped[name] = why(reason)
            continue
        y = torch.stack(y) if isinstance(y, list) else y
        assert (y - plain).abs().max() < 1e-2 * plain.abs().max(), name
        runs[name] = run
    return {"ours": ours_of(x, q, T), **runs}, skipped


def with_backward(runs, case, device) -> dict:
    """Forward and backward with respect to each case's own parameters,
    and to x if it asks for it."""
    x, q = make(case, device)
    T, N, O = case[3], case[2], case[1]  # noqa: E741
    grad_y = torch.randn(T, N, O, device=device)

    def step(build, name):
        run = ours_of(x, q, T) if name == "ours" else build(x, q, T)
        wanted = [*getattr(run, "parameters", q), *([x] if x.requires_grad else [])]
        grad = grad_y.unbind() if isinstance(run(), list) else grad_y
        return lambda: torch.autograd.grad(run(), wanted, grad, allow_unused=True)

    return {name: step(runs[name], name) for name in runs}


# A compilation takes longer than all the rounds of a case: on a GPU one of the grid is compiled.
COMPILED_ON_CUDA = (1024, 1024, 128, 4, True)


def wanted_on(device: str, case) -> dict:
    wanted = {**yardsticks.PLAIN, **yardsticks.PACKAGES}
    if FULL and (device == "cpu" or case == COMPILED_ON_CUDA):
        wanted |= yardsticks.COMPILED
    return wanted | ({"Triton": yardsticks.triton} if device == "cuda" else {})


def time_for(device: str, short: float) -> float:
    """Seconds of a case: the grid of a GPU has 120 of them and some six minutes."""
    return 1.5 if device == "cuda" else 6 if FULL else short


def best_of(names) -> dict[str, float]:
    """On a GPU never slower than an alternative that draws noise."""
    return {name: 1.0 for name in names if name in ("stacked", "Triton")}


@pytest.mark.parametrize("device,case", ON, ids=str)
def test_bayes_linear(benchmark, device, case):
    check_ours(case, device)
    wanted = wanted_on(device, case)
    with torch.no_grad():
        runs, skipped = checked(case, device, wanted)
        times = compare(runs, rounds=25, seconds=time_for(device, 2), device=device)
    target = {"nn.Linear x T": round(1 / 1.5, 2)} if device == "cpu" else best_of(runs)
    label = f"bayes_linear {name_of(case)} {device} forward"
    record(benchmark, label, times, skipped=skipped, target=target)
    benchmark.pedantic(runs["ours"], rounds=3)


FUSED = [(1024, rows, 100) for rows in (1, 8, 32)] + [(4096, rows, 20) for rows in (1, 8, 32, 128)]


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("size,rows,T", FUSED)
@torch.no_grad()
def test_fused_product_on_cuda(benchmark, size, rows, T):
    """The fused kernel beside its noise alone: a share of 0.85 of that rate is wanted."""
    x, q = make((size, size, rows, T, False), "cuda")
    seed, fused = ops.new_seed(0, 0, "cuda"), torch.ops.bnuq
    base = torch.zeros(T, rows, size, device="cuda")
    operands = fused.bayes_operands(x, q.rho)
    runs = {
        "ours": lambda: fused.bayes_forward(*operands, base, seed, 0, T),
        "noise alone": noise_alone(seed, T, size, size),
    }
    times = compare(runs, rounds=25, seconds=1.5, device="cuda")
    label = f"fused product {size}->{size} {rows} rows T={T}"
    record(benchmark, label, times, target={"noise alone": 0.85})
    benchmark.pedantic(runs["ours"], rounds=3)


NEAR_THE_LIMIT = [(400, rows, T) for rows in (1, 8, 32) for T in (1, 20, 100)]
NEAR_THE_LIMIT += [(1024, rows, T) for rows in (8, 32, 128) for T in (1, 20)]


def by_way(way: str, run):
    def forced():
        with going(way):
            return run()

    return forced


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("size,rows,T", NEAR_THE_LIMIT)
def test_the_better_way_on_cuda(benchmark, size, rows, T, backward):
    """The way that a call takes beside all three; the backward is the forward's way too."""
    case = (size, size, rows, T, False)
    x, q = make(case, "cuda")
    run = with_backward({"ours": None}, case, "cuda")["ours"] if backward else ours_of(x, q, T)
    ways = ("direct", "sampled", "fused")
    runs = {"ours": by_way("by size", run)} | {way: by_way(way, run) for way in ways}
    with torch.set_grad_enabled(backward):
        times = compare(runs, rounds=25, seconds=1, device="cuda")
        benchmark.pedantic(run, rounds=3)
    label = f"ways {name_of(case)} {'forward+backward' if backward else 'forward'}"
    record(benchmark, label, times, target=dict.fromkeys(ways, 1.0))


@pytest.mark.parametrize("device,case", ON, ids=str)
def test_bayes_linear_backward(benchmark, device, case):
    wanted = {"ours": None, **wanted_on(device, case)}
    wanted.pop("Triton", None)
    with torch.no_grad():
        _, skipped = checked(case, device, {n: b for n, b in wanted.items() if n != "ours"})
    runs = with_backward({n: b for n, b in wanted.items() if n not in skipped}, case, device)
    if device == "cuda":
        x, q = make(case, device)
        runs["forward alone"] = ours_of(x, q, case[3])
    times = compare(runs, rounds=25, seconds=time_for(device, 3), device=device)
    target = (
        {"nn.Linear x T": round(1 / 1.6, 2)}
        if device == "cpu"
        else {"forward alone": round(1 / 3.3, 2)}
    )
    label = f"bayes_linear {name_of(case)} {device} forward+backward"
    record(benchmark, label, times, skipped=skipped, target=target)
    benchmark.pedantic(runs["ours"], rounds=3)


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("case", GRID[::7], ids=name_of)
def test_backward_in_a_cuda_graph(benchmark, case):
    """At most 3.3 times forward, both without launches, Python and autograd's thread."""
    x, q = make(case, "cuda")
    both = with_backward({"ours": None}, case, "cuda")["ours"]
    cases = {"ours": in_a_graph(both), "forward alone": in_a_graph(ours_of(x, q, case[3]))}
    times = compare(cases, rounds=51, seconds=1.5, device="cuda")
    label = f"bayes_linear {name_of(case)} in a CUDA graph, forward+backward"
    record(benchmark, label, times, target={"forward alone": round(1 / 3.3, 2)})
    benchmark.pedantic(cases["ours"], rounds=3)


@pytest.mark.parametrize("case", ONE_ROW, ids=name_of)
@torch.no_grad()
def test_one_row(benchmark, case):
    check_ours(case, "cpu")
    runs, skipped = checked(case, "cpu", {"stacked": yardsticks.stacked})
    times = compare(runs, rounds=15, seconds=8 if FULL else 2)
    target = {"stacked": 8.0 if case[0] == 1024 else 4.0}
    record(benchmark, f"bayes_linear {name_of(case)}", times, skipped=skipped, target=target)
    benchmark.pedantic(runs["ours"], rounds=3)


# ---- a training step ----------------------------------------------------------------------------

SIZES = (784, 400, 400, 10)


def mlp(layer) -> nn.Sequential:
    pairs = list(zip(SIZES, SIZES[1:], strict=False))
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
