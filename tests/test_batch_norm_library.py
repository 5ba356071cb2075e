"""opcheck, torch.compile and torch.export of the batch-norm ops.

Warnings of torch itself inside these are let through.
"""

import pytest
import torch
from batch_norm_cases import OPS, call, make
from conftest import DTYPES

from bnuq_ext import ops

pytestmark = pytest.mark.filterwarnings("ignore")


CHECKED = [("bank", dtype) for dtype in DTYPES]
CHECKED += [("normal", dtype) for dtype in (torch.float32, torch.bfloat16)]


def raw_arguments(op, t, T, shared, slope=0.0):
    seed = ops.new_seed(3, 1, t["x"].device)
    affine = (t["weight"], t["bias"], t["residual"], 1e-5, slope, shared)
    if op == "bank":
        return (t["x"], t["mean"], t["var"], seed, None, T, *affine)
    return (t["x"], t["params"], seed, 2, ops.batch_norm.FAMILIES[op], T, *affine)


def raw_op(op, suffix=""):
    return getattr(
        torch.ops.bnuq, ("batch_norm_bank" if op == "bank" else "batch_norm_fitted") + suffix
    ).default


@pytest.mark.parametrize("op, dtype", CHECKED, ids=str)
@pytest.mark.parametrize("shape, channels_last", [((2, 3), False), ((2, 3, 2, 4), True),
                                                  ((0, 3), False), ((2, 3, 0), False)], ids=str)  # fmt: skip
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_opcheck(op, shape, channels_last, requires_grad, device, dtype):
    for shared in (False, True):
        t = make(op, shape, 2, shared=shared, channels_last=channels_last, dtype=dtype,
                 device=device)  # fmt: skip
        for value in t.values():
            value.requires_grad_(requires_grad)
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        if requires_grad and dtype == torch.float32 and shape[0]:
            tests += ("test_aot_dispatch_dynamic",)
        torch.library.opcheck(raw_op(op), raw_arguments(op, t, 2, shared), test_utils=tests)


@pytest.mark.parametrize("op, dtype", CHECKED, ids=str)
@pytest.mark.parametrize("shape, channels_last", [((2, 3), False), ((2, 3, 2, 4), True)], ids=str)
def test_opcheck_out_and_backward(op, shape, channels_last, device, dtype):
    for shared in (False, True):
        t = make(op, shape, 2, shared=shared, channels_last=channels_last, dtype=dtype,
                 device=device)  # fmt: skip
        arguments = raw_arguments(op, t, 2, shared)
        y = raw_op(op)(*arguments)
        torch.library.opcheck(raw_op(op, "_out"), (torch.empty_like(y), *arguments))
        statistics, weight, scalars = arguments[1:-6], t["weight"], (1e-5, 0.0, shared)
        for needs in [(True, True, True), (False, False, True)]:
            backward = (torch.ones_like(y), t["x"], y, *statistics, weight, *scalars, *needs)
            torch.library.opcheck(
                raw_op(op, "_backward"), backward, test_utils=("test_schema", "test_faketensor")
            )


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
FORMATS = [
    torch.empty(4, 3, 2, 5),
    torch.empty(4, 3, 2, 5, 3),
    torch.empty(4, 3, 2, 5, memory_format=LAST),
    torch.empty(4, 3, 2, 5, 3, memory_format=LAST_3D),
    torch.empty(4, 3, 2, 1, memory_format=LAST),  # where a size is 1, its stride says nothing
    torch.empty(4, 3, 1, 5, memory_format=LAST),
    torch.empty(4, 3, 2, 1, 3, memory_format=LAST_3D),
    torch.empty(4, 3, 5, 6, memory_format=LAST)[..., :1],
    torch.empty_strided((4, 3, 1, 5), (15, 1, 99, 3)),
    torch.empty(4, 1, 2, 5, memory_format=LAST),
    torch.empty(4, 6, 2, 5, memory_format=LAST)[:, ::2],
    torch.empty(4, 3, 5, 2).mT,
    torch.empty(4, 3, 2, 5, 3).transpose(2, 4),
]


@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("k", range(len(FORMATS)))
def test_fakes_have_the_strides_of_results(k, shared):
    """A compiler lays memory out by them. Backward takes the format of the output,
    else of its gradient."""
    x, T = torch.empty_strided(FORMATS[k].shape, FORMATS[k].stride()).fill_(0.5), 2
    C = x.shape[1]
    affine = (torch.ones(C), torch.ones(C), None, 1e-5)
    bank = (torch.zeros(3, C), torch.ones(3, C), torch.tensor([0, 1]), None, T)

    def run(x, bank, affine):
        y = torch.ops.bnuq.batch_norm_bank(x, *bank, *affine, 0.0, shared)
        others = [y.contiguous(), y]
        grads = [
            torch.ops.bnuq.batch_norm_bank_backward(
                g, x, out, *bank, affine[0], 1e-5, slope, shared, True, True, True
            )[:2]
            for g in others
            for out, slope in ((y, 0.0), (None, 1.0))
        ]
        return [y, *(g for pair in grads for g in pair)]

    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (x, bank, affine))
        expected = [(v.shape, v.stride()) for v in run(*fake)]
    assert [(v.shape, v.stride()) for v in run(x, bank, affine)] == expected


def layer(tensors, op, shared):
    """Ops of torch before and after, so that the compiler has something to fuse."""
    tensors = {**tensors, "x": tensors["x"] * 2}
    return call(op, tensors, 3, activation="relu", shared=shared) + 1


def check_compiled(op, tensors, shared, backend):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, layer):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in tensors.items()}
        y = function(leaves, op, shared)
        y.square().sum().backward()
        results.append([y, *(value.grad for value in leaves.values())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_compile(op, shared, channels_last, device):
    tensors = make(
        op, (2, 3, 4, 4), 3, shared=shared, channels_last=channels_last, dtype=torch.float32,
        device=device,
    )  # fmt: skip
    check_compiled(op, tensors, shared, "aot_eager")


def test_compile_with_inductor(device):
    tensors = make("bank", (4, 3, 5, 5), 3, dtype=torch.float32, device=device)
    check_compiled("bank", tensors, False, "inductor")


def test_compile_with_snapshot_and_out(device):
    t = make("bank", (2, 3, 4), 3, dtype=torch.float32, device=device)

    def function(x, mean, var, snapshot, out):
        ops.batch_norm_bank(x, mean, var, snapshot=snapshot, out=out)
        return out * 2

    snapshot = torch.tensor([0, 2, 1], device=device)
    arguments = (t["x"], t["mean"], t["var"], snapshot)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = torch.empty_like(t["x"]), torch.empty_like(t["x"])
    torch.testing.assert_close(compiled(*arguments, actual), function(*arguments, expected))
    torch.testing.assert_close(actual, expected)


def test_another_seed_does_not_compile_again(device):
    t = make("normal", (2, 3, 4), 3, dtype=torch.float32, device=device)
    counter = torch._dynamo.testing.CompileCounter()

    def function(x, params, seed):
        return ops.batch_norm_fitted(x, params, seed, 1, 3, "normal")

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for key, first in [(0, 0), (5, 0), (5, 3)]:
        seed = ops.new_seed(key, first, device)
        actual = compiled(t["x"], t["params"], seed)
        torch.testing.assert_close(actual, function(t["x"], t["params"], seed))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", ["bank", "lognormal"])
def test_export(op, device):
    class Layer(torch.nn.Module):
        def forward(self, x, residual, weight, bias, *statistics):
            names = ("mean", "var") if op == "bank" else ("params",)
            tensors = dict(zip(names, statistics, strict=True))
            affine = {"weight": weight, "bias": bias, "residual": residual}
            return call(op, {"x": x, **tensors, **affine}, 3, activation="relu")

    t = make(op, (2, 3, 4), 3, dtype=torch.float32, device=device)
    statistics = [t[name] for name in ("mean", "var", "params") if name in t]
    arguments = (t["x"], t["residual"], t["weight"], t["bias"], *statistics)
    exported = torch.export.export(Layer(), arguments)
    torch.testing.assert_close(exported.module()(*arguments), Layer()(*arguments))


@pytest.mark.parametrize("op", OPS)
def test_dynamic_rows(op, device):
    """One compilation for any number of rows."""
    tensors = make(op, (2, 3, 4), 3, dtype=torch.float32, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for rows in (2, 4, 7):
        t = make(op, (rows, 3, 4), 3, dtype=torch.float32, device=device)
        t = {**tensors, "x": t["x"], "residual": t["residual"]}
        torch.testing.assert_close(compiled(t, op, False), layer(t, op, False))
    assert counter.frame_count <= 2
