"""bayes_linear against plain PyTorch and other packages."""

import pytest
import torch
import torch.nn.functional as F

from bnuq_ext import ops
from bnuq_ext.ops.linear_ways import going

from . import bayes_yardsticks as yardsticks
from .bayes_yardsticks import Posterior
from .noise_floor import noise_alone
from .timing import DEVICES, FULL, compare, in_a_graph, record
from .yardsticks import why

pytestmark = pytest.mark.filterwarnings("default")

# features in, features out, rows, T, one x shared by the replicas
CASES = [(784, 400, 128, 10, True), (1024, 1024, 128, 10, not FULL)]
SMALL = [(13, 50, 32, 100, True), (50, 1, 32, 100, False)]
if FULL:
    CASES += [(784, 400, 128, 10, False), (1024, 1024, 128, 10, True), *SMALL]
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
