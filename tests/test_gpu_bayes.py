"""What of the Bayesian ops only a GPU can show: graphs, sizes of grids, memory, many rows."""

import pytest
import torch
from drawn import layer_noise
from torch import nn
from zoo import Wrapped

from benchmarks.timing import in_a_graph
from bnuq_ext import BayesLinear, ScaleMixturePrior, elbo_loss, ops, reference
from bnuq_ext.ops.linear_ways import going

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STREAM = 3


def made(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def parameters(O, I):  # noqa: E741
    values = (made(O, I) / I**0.5, made(O, I + 1)[:, 1:] - 4, made(O), made(O) - 4)
    return [v.contiguous().requires_grad_() for v in values]


def run(x, weights, seed, T):
    return ops.bayes_linear(x, *weights, seed=seed, stream=STREAM, num_samples=T)


def expected_of(x, weights, seed, T):
    return reference.bayes_linear(x, *weights, *layer_noise(seed, STREAM, T, *weights[0].shape))


def assert_near(actual, expected, share=2e-3):
    """To a share of the largest: the noise has 11 bits."""
    assert (actual.double() - expected).abs().max() <= share * expected.abs().max()


@pytest.fixture(params=["fused", "direct", "sampled"])
def way(request):
    """Of all calls of a test, whatever their sizes; with many rows the fused one is batched."""
    with going(request.param):
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("T", [1, 2, 4, 10])
@pytest.mark.parametrize(
    "N,I,O", [(1, 784, 400), (8, 400, 400), (32, 1024, 130), (64, 70, 400), (128, 784, 400), (600, 90, 70)]
)  # fmt: skip
def test_every_form_matches_the_reference(N, I, O, T, shared):  # noqa: E741
    x = (made(N, I) if shared else made(T, N, I)).requires_grad_()
    weights, seed = parameters(O, I), ops.new_seed(4, 2, "cuda")
    inputs = [x, *weights]
    inputs64 = [v.detach().double().requires_grad_() for v in inputs]
    y, expected = run(x, weights, seed, T), expected_of(inputs64[0], inputs64[1:], seed, T)
    assert_near(y, expected)
    grad_y = made(T, N, O)
    actual = torch.autograd.grad(y, inputs, grad_y)
    wanted = torch.autograd.grad(expected, inputs64, grad_y.double())
    for a, w in zip(actual, wanted, strict=True):
        assert_near(a, w)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("N", [1, 40, 200, 600])
def test_repeats_are_bit_equal(N):
    weights, x, seed = (
        parameters(300, 200),
        made(N, 200).requires_grad_(),
        ops.new_seed(1, 0, "cuda"),
    )

    def once():
        y = run(x, weights, seed, 5)
        return y, *torch.autograd.grad(y, [x, *weights], torch.ones_like(y))

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("N", [1, 40, 600])
def test_a_graph_draws_afresh_at_every_replay(N):
    T, x, seed = 3, made(N, 64), ops.new_seed(3, 0, "cuda")
    weights = [v.detach() for v in parameters(48, 64)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x, weights, seed, T)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, weights, seed, T)
        seed[1] += T
    for replay in range(3):
        graph.replay()
        expected = run(x, weights, ops.new_seed(3, replay * T, "cuda"), T)
        torch.testing.assert_close(y, expected)


class Scaled(nn.Sequential):
    """No chain, so that several samples go together only after a trial."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("T", [1, 3])
def test_a_chain_has_the_loss_and_the_gradients_of_any_other_model(T):
    options = {"rho_init": -1.0, "device": "cuda"}
    model = nn.Sequential(BayesLinear(64, 48, **options), nn.ReLU(), BayesLinear(48, 10, **options))
    x, y = made(32, 64), torch.arange(32, device="cuda") % 10
    results = []
    for given in (model, Wrapped(model)):
        out = elbo_loss(given, x, y, num_samples=T, batch_weight=0.1, seed=2)
        results.append([*out, *torch.autograd.grad(out.loss, list(model.parameters()))])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected.double())


@pytest.mark.filterwarnings("ignore")  # torch's own: gradients are first made on another stream
@pytest.mark.parametrize("prior", [None, ScaleMixturePrior(0.5, 1.0, 0.1)], ids=["normal", "mix"])
@pytest.mark.parametrize("kind, num_samples", [(nn.Sequential, 1), (nn.Sequential, 3), (Scaled, 3)])
def test_a_graph_of_a_training_step_draws_afresh_at_every_replay(prior, kind, num_samples):
    options = {"rho_init": -1.0, "device": "cuda"} | ({"prior": prior} if prior else {})
    model = kind(BayesLinear(64, 48, **options), nn.ReLU(), BayesLinear(48, 10, **options))
    x, y = made(32, 64), torch.zeros(32, dtype=torch.long, device="cuda")

    def step():
        model.zero_grad()
        loss = elbo_loss(model, x, y, num_samples=num_samples, batch_weight=0.1).loss
        loss.backward()
        return loss

    made_in_turn = []
    replay = in_a_graph(lambda: made_in_turn.append(step()))
    loss = made_in_turn[-1]
    losses, grads = [], []
    for _ in range(3):
        replay()
        losses.append(loss.item())
        grads.append(model[0].weight_rho.grad.clone())
    assert len(set(losses)) == 3 and not torch.equal(grads[0], grads[1])
    eager = [step().item() for _ in range(20)]  # of the same distribution
    assert min(eager) / 2 < min(losses) and max(losses) < 2 * max(eager)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shared", [True, False])
def test_more_replicas_than_a_grid_has_rows(shared):
    """A grid has 65535 blocks along y and z."""
    T, x = 300_000, made(1, 16)
    weights, seed = parameters(2, 16), ops.new_seed(5, 0, "cuda")
    xs = (x if shared else x.expand(T, 1, 16).contiguous()).requires_grad_()
    y = run(xs, weights, seed, T)
    last = run(x, weights, ops.new_seed(5, T - 3, "cuda"), 3)
    torch.testing.assert_close(y[-3:], last, rtol=1e-3, atol=1e-3)
    (grad,) = torch.autograd.grad(y, xs, torch.ones_like(y))
    assert grad.isfinite().all() and (shared or grad[-1].abs().sum() > 0)


def peak(N, T, dtype):
    weights = [
        v.detach().to(torch.promote_types(dtype, torch.float32)) for v in parameters(512, 512)
    ]
    weights = [v.requires_grad_() for v in weights]
    x, seed = made(N, 512, dtype=dtype), ops.new_seed(0, 0, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x, weights, seed, T).sum().backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("N,dtype", [(4, torch.float32), (600, torch.bfloat16), (4, torch.float64)])
def test_no_weight_matrix_of_a_replica_is_kept(N, dtype):
    """Beyond a chunk of 32 MiB only what has the size of the outputs grows with T:
    six such at the most."""
    peak(N, 2, dtype)  # workspaces of torch's products
    few, many = peak(N, 64, dtype), peak(N, 128, dtype)
    assert many - few <= 6 * 64 * N * 512 * (8 if dtype == torch.float64 else 4)
