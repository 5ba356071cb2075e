"""The ways of bayes_linear on CUDA: which a call takes, and what all of them have to do alike.

Without a GPU `test_hostrun_ops` runs these with the kernels emulated.
"""

import pytest
import torch
from test_gpu_bayes import STREAM, assert_near, made, parameters, run

from bnuq_ext import ops
from bnuq_ext.ops.linear_ways import WAYS, going, way_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=WAYS[1:])
def way(request):
    with going(request.param):
        yield request.param


def gradients(x, weights, seed, grad_y, needs=(True,) * 3):
    """Of the op itself: by x, mu, rho and the halves of the bias."""
    mu, rho, _, bias_rho = (w.detach() for w in weights)
    given = (grad_y, x.detach(), mu, rho, bias_rho, seed, STREAM, len(grad_y))
    with torch.no_grad():
        return torch.ops.bnuq.bayes_linear_backward(*given, *needs)


def test_which_way_a_call_goes():
    """By rows, weights and float64; whatever the number of replicas."""
    mu = {size: torch.empty(size, size, device="meta") for size in (16, 443, 444, 724, 725)}

    def way(N, size, dtype=torch.float32):
        return way_of(torch.empty(3, N, size, dtype=dtype, device="meta"), mu[size])

    direct = [(1, 16), (8, 443), (1000, 725, torch.float64)]
    sampled = [(9, 16), (1, 444), (512, 724, torch.bfloat16)]
    fused, batched = [(1, 725), (128, 725)], [(129, 725), (512, 725), (513, 16)]
    for calls, name in zip((direct, sampled, fused, batched), WAYS[1:], strict=True):
        assert all(way(*call) == name for call in calls), name


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exact", ["direct", "sampled"])
def test_inputs_of_16_bits_are_summed_in_float32(exact, shared, dtype):
    x = (made(5, 20) if shared else made(3, 5, 20)).to(dtype)
    weights, seed = parameters(9, 20), ops.new_seed(1, 0, "cuda")
    with going(exact), torch.no_grad():
        y, expected = run(x, weights, seed, 3), run(x.float(), weights, seed, 3)
        assert y.dtype == dtype and torch.equal(y, expected.to(dtype))
        grads = [gradients(v, weights, seed, y.to(v.dtype)) for v in (x, x.float())]
    for actual, wanted in zip(*grads, strict=True):
        assert torch.equal(actual, wanted.to(actual.dtype))
    assert grads[0][0].dtype == dtype and grads[0][1].dtype == torch.float32


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], ids=str)
def test_only_what_is_needed_is_made(way, needs):
    x, weights, seed = made(3, 20), parameters(9, 20), ops.new_seed(1, 0, "cuda")
    grad_y, needs = made(2, 3, 9), tuple(map(bool, needs))
    everything = gradients(x, weights, seed, grad_y)
    some = gradients(x, weights, seed, grad_y, needs)
    needed = (needs[0], needs[1], needs[1], needs[2], needs[2])
    for actual, wanted, kept in zip(some, everything, needed, strict=True):
        if kept:
            exact = dict(rtol=0, atol=0) if way == "direct" else {}
            torch.testing.assert_close(actual, wanted, **exact)
        else:
            assert actual.numel() == 0


MOST = 65535 * 64  # features
WRONG = {  # shapes of x, mu and rho for T = 3
    "features": ((4, 21), (9, 20), (9, 20), "x must be"),
    "replicas": ((2, 4, 20), (9, 20), (9, 20), "all replicas or none"),
    "one replica of three": ((1, 4, 20), (9, 20), (9, 20), "all replicas or none"),
    "rho": ((4, 20), (9, 20), (9, 16), "rho must be like mu"),
    "width": ((1, MOST + 1), (1, MOST + 1), (1, MOST + 1), f"at most {MOST} rows and columns"),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", WRONG)
def test_the_op_itself_reads_nothing_of_wrong_shapes(case):
    *shapes, message = WRONG[case]
    x, mu, rho = (made(*shape) for shape in shapes)
    seed, op = ops.new_seed(1, 0, "cuda"), torch.ops.bnuq
    with pytest.raises(RuntimeError, match=message):
        op.bayes_linear(x, mu, rho, None, None, seed, STREAM, 3)
    with pytest.raises(RuntimeError, match=message):
        given = (made(3, 4, 9), x, mu, rho, None, seed, STREAM, 3)
        op.bayes_linear_backward(*given, True, True, False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "x_type,type,T,message",
    [(torch.float32, torch.float64, 3, "in the dtype that x has sums of"),
     (torch.float64, torch.float32, 3, "in the dtype that x has sums of"),
     (torch.float32, torch.float32, 0, "be one or more")],
)  # fmt: skip
def test_the_op_itself_takes_one_dtype_and_some_replicas(x_type, type, T, message):
    x, mu, seed = made(4, 20, dtype=x_type), made(9, 20, dtype=type), ops.new_seed(1, 0, "cuda")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bnuq.bayes_linear(x, mu, mu, None, None, seed, STREAM, T)
    with pytest.raises(RuntimeError, match=message):
        given = (made(T, 4, 9, dtype=type), x, mu, mu, None, seed, STREAM, T)
        torch.ops.bnuq.bayes_linear_backward(*given, True, True, False)


def shifted(x):
    """The same numbers one element further on."""
    room = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    return room.copy_(x)


NOT_PACKED = {  # what takes the place of an operand, and what is said of it
    "x of other columns": ("x", lambda x: x[..., :20].contiguous(), "x must be packed"),
    "x in between": ("x", shifted, "begin on 16 bytes"),
    "half a sigma": ("sigma", lambda sigma: sigma[:64], "sigma must be packed"),
    "no rows": ("base", lambda base: base[:, :0], "x must be packed"),
    "base of 16 bits": ("base", torch.Tensor.half, "must be float32"),
    "another number of replicas": ("num_samples", lambda T: T + 1, "x must be packed"),
}


@pytest.mark.parametrize("case", NOT_PACKED)
def test_the_fused_product_alone_reads_nothing_else_than_its_operands(case):
    name, changed, message = NOT_PACKED[case]
    seed, op = ops.new_seed(1, 0, "cuda"), torch.ops.bnuq
    made_of_both = op.bayes_operands(made(3, 4, 20), made(9, 20))
    names = ("x", "x_scale", "sigma", "sigma_scale", "base", "seed", "stream", "num_samples")
    operands = dict(zip(names, [*made_of_both, made(3, 4, 9), seed, STREAM, 3], strict=True))
    operands[name] = changed(operands[name])
    with pytest.raises(RuntimeError, match=message):
        op.bayes_forward(*operands.values())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [1, 40])
def test_a_replica_alone_is_what_it_is_among_others(N, dtype):
    """To far less than the rounding of 16-bit operands:
    `predict` promises it for every chunk and strategy."""
    T, x, weights = 5, made(N, 70, dtype=dtype), [v.detach() for v in parameters(33, 70)]
    weights[1] += 4.0  # noise as large as the rest
    together = run(x, weights, ops.new_seed(4, 2, "cuda"), T).float()
    near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-8, atol=1e-5)
    for t in range(T):
        alone = run(x, weights, ops.new_seed(4, 2 + t, "cuda"), 1).float()
        torch.testing.assert_close(alone[0], together[t], **near)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("O,T", [(1, 1), (17, 40), (250, 300)])
def test_biases_are_sampled_by_every_way(O, T):  # noqa: E741
    """Alone, at x = 0: not within the rounding of a product."""
    x, weights, seed = made(1, 3) * 0, parameters(O, 3), ops.new_seed(4, 2, "cuda")
    eps = ops.philox_normal(seed, STREAM, (T, O), tag="bias").double()
    _, _, bias_mu, bias_rho = (w.detach().double() for w in weights)
    y, grad_y = run(x, weights, seed, T), made(T, 1, O)
    expected = bias_mu + torch.nn.functional.softplus(bias_rho) * eps
    torch.testing.assert_close(y[:, 0].double(), expected, rtol=1e-5, atol=2e-6)
    by_mu, by_rho = torch.autograd.grad(y, weights[2:], grad_y)
    by_y, near = grad_y[:, 0].double(), dict(rtol=1e-5, atol=2e-6 * T**0.5)
    torch.testing.assert_close(by_mu.double(), by_y.sum(0), **near)
    torch.testing.assert_close(
        by_rho.double(), (by_y * eps).sum(0) * torch.sigmoid(bias_rho), **near
    )


@pytest.mark.parametrize(
    "way,weight_bytes,near",
    [("sampled", 4, dict(rtol=1e-5, atol=1e-5)), ("batched", 2, dict(rtol=1e-4, atol=1e-4))],
)
@pytest.mark.parametrize("shared", [True, False])
def test_weights_in_chunks_of_two_replicas_and_one(way, weight_bytes, near, shared):
    T, N, I, O = 5, 9, 70, 33  # noqa: E741
    x, weights = (made(N, I) if shared else made(T, N, I)), parameters(O, I)
    seed, grad_y = ops.new_seed(4, 2, "cuda"), made(T, N, O)

    def results(chunk_bytes):
        with going(way, chunk_bytes), torch.no_grad():
            return run(x, weights, seed, T), *gradients(x, weights, seed, grad_y)

    expected = results(0)
    for actual, wanted in zip(results(2 * weight_bytes * O * I), expected, strict=True):
        torch.testing.assert_close(actual, wanted, **near)


@pytest.mark.parametrize("way,weight_bytes", [("sampled", 4), ("batched", 2)])
def test_the_memory_held_is_one_chunk_s(way, weight_bytes):
    """Of 60 replicas' weights: those of two, beside what has their number of rows."""
    T, N, size = 60, 2, 128
    x, weights, seed = made(N, size), parameters(size, size), ops.new_seed(4, 2, "cuda")
    grad_y, replica = made(T, N, size), weight_bytes * size * size
    # The batched way's other gradients are the fused kernel's: of few weights, parts of sums.
    needs = (True, way == "sampled", True)
    for call in (
        lambda: run(x, weights, seed, T),
        lambda: gradients(x, weights, seed, grad_y, needs),
    ):
        with going(way, 2 * replica), torch.no_grad():
            call()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
        held = torch.cuda.max_memory_allocated() - before
        assert 2 * replica <= held < 15 * replica, f"{held / replica:.1f} replicas"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_batched_products_are_the_fused_ones(shared, dtype):
    """The same operands and noise: what differs is the order of the sums."""
    T, N, I, O = 5, 9, 21, 19  # noqa: E741
    x, weights = (made(N, I) if shared else made(T, N, I)).to(dtype), parameters(O, I)
    seed, grad_y, results = ops.new_seed(2, 0, "cuda"), made(T, N, O).to(dtype), []
    for way in ("fused", "batched"):
        with going(way), torch.no_grad():
            results.append([run(x, weights, seed, T), *gradients(x, weights, seed, grad_y)])
    near = dict(rtol=1.6e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, **near)


@pytest.fixture
def half_sums():
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    yield
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


@pytest.mark.usefixtures("half_sums")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_where_torch_may_sum_in_float16(dtype):
    """Then it refuses float32 results of float16 matrices."""
    x, weights, seed = made(200, 20, dtype=dtype), parameters(9, 20), ops.new_seed(1, 0, "cuda")
    grad_y, results = made(3, 200, 9, dtype=dtype), []
    for way in ("batched", "sampled"):
        with going(way), torch.no_grad():
            results.append([run(x, weights, seed, 3), *gradients(x, weights, seed, grad_y)])
    for actual, wanted in zip(*results, strict=True):
        share = 2e-3 if dtype == torch.float32 else 1e-2
        assert_near(actual, wanted.double(), share)
