"""Strides, views, aliases, empty inputs, threads."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batch_norm_cases import FIRST, KEY, OPS, call, contiguous_as, make

from bnuq_ext import ops

VIEWS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every_second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "flipped_twice": lambda x: x.flip(-1).flip(-1),
    "negative_step": lambda x: x.flip(0)[torch.arange(len(x) - 1, -1, -1)],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "permuted": lambda x: x.movedim(1, 2).contiguous().movedim(2, 1),
    "expanded": lambda x: x[:1, :1, :1].expand_as(x),
    "narrowed": lambda x: torch.cat([x, x], 2).narrow(2, x.shape[2], x.shape[2]),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("shape", [(4, 5, 6), (2, 3, 4, 5)], ids=str)
def test_views_equal_contiguous(op, name, shape, device, dtype):
    tensors = make(op, shape, 2, dtype=dtype, device=device)
    view = VIEWS[name](tensors["x"])
    plain = {**tensors, "x": view.contiguous()}
    for x, residual in ((view, "residual"), (plain["x"], None)):
        given = {**tensors, "x": x}
        if residual is None:
            given["residual"] = VIEWS[name](tensors["residual"])
            plain["residual"] = given["residual"].contiguous()
        y = call(op, given, 2, activation="relu")
        assert torch.equal(y, call(op, plain, 2, activation="relu"))
        assert y.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 12, 1, 1), (2, 12, 1, 1), (1, 12, 2, 2), (1, 12, 1, 1, 1)])
@pytest.mark.parametrize("step", [2, 3])
def test_every_second_channel(shape, step, device, dtype):
    """Where other sizes are 1, only the channels' own stride tells the view from channels_last."""
    x = torch.randn(shape, device=device).to(dtype)[:, ::step]
    tensors = make("bank", x.shape, 1, dtype=dtype, device=device) | {"x": x}
    y = call("bank", tensors, 1)
    assert torch.equal(y, call("bank", tensors | {"x": x.contiguous()}, 1))


@pytest.mark.parametrize("op", OPS)
def test_views_of_parameters(op, device):
    tensors = make(op, (3, 4), 2, device=device)
    views = {
        name: v if name in ("x", "residual") else v.repeat_interleave(2, -1)[..., ::2]
        for name, v in tensors.items()
    }
    assert torch.equal(call(op, views, 2), call(op, tensors, 2))


def test_views_of_seed_and_snapshot(device):
    t = make("bank", (3, 4), 2, device=device)
    seed = torch.tensor([7, -1, 2, -1], device=device)[::2]
    snapshot = torch.tensor([2, -1, 0, -1], device=device)[::2]
    for view in ({"seed": seed, "num_samples": 2}, {"snapshot": snapshot}):
        plain = {k: v.clone() if torch.is_tensor(v) else v for k, v in view.items()}
        y = ops.batch_norm_bank(t["x"], t["mean"], t["var"], **view)
        assert torch.equal(y, ops.batch_norm_bank(t["x"], t["mean"], t["var"], **plain))
    t = make("normal", (3, 4), 2, device=device)
    y = ops.batch_norm_fitted(t["x"], t["params"], seed, 0, 2, "normal")
    assert torch.equal(y, ops.batch_norm_fitted(t["x"], t["params"], seed.clone(), 0, 2, "normal"))
    for draw in (
        lambda seed: ops.philox_normal(seed, 0, (2, 9)),
        lambda seed: ops.snapshot_indices(seed, 5, 9),
    ):
        assert torch.equal(draw(seed), draw(seed.clone()))


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("residual_last", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_channels_last_is_kept(shape, residual_last, shared, device, dtype):
    tensors = make("bank", shape, 3, shared=shared, dtype=dtype, device=device)
    last = {
        **tensors,
        "x": contiguous_as(tensors["x"], True),
        "residual": contiguous_as(tensors["residual"], residual_last),
    }
    y = call("bank", last, 3, shared=shared)
    assert torch.equal(y, call("bank", tensors, 3, shared=shared))
    assert y.stride() == contiguous_as(y, True).stride()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_out(op, shared, channels_last, device, dtype):
    tensors = make(
        op, (2, 3, 4, 4), 3, shared=shared, channels_last=channels_last, dtype=dtype, device=device
    )
    expected = call(op, tensors, 3, shared=shared)
    out = torch.full_like(expected, float("nan"))
    assert call(op, tensors, 3, shared=shared, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("alias", ["x", "residual"])
def test_out_may_be_an_input(alias, device, dtype):
    tensors = make("bank", (40, 30, 20), 3, dtype=dtype, device=device)
    expected = call("bank", tensors, 3, activation="relu")
    call("bank", tensors, 3, activation="relu", out=tensors[alias])
    assert torch.equal(tensors[alias], expected)


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_changed(op, device):
    tensors = make(op, (3, 4, 5), 2, device=device)
    copies = {name: value.clone() for name, value in tensors.items()}
    for value in tensors.values():
        value.requires_grad_()
    call(op, tensors, 2, activation="relu").sum().backward()
    for name, value in tensors.items():
        assert torch.equal(value.detach(), copies[name]) and value._version == 0


def test_arguments_may_be_one_tensor(device):
    """Statistics that alias each other, weight that is the bias, residual that is x."""
    t = make("bank", (3, 4), 2, device=device)
    one = {"x": t["x"], "residual": t["x"], "mean": t["var"], "var": t["var"],
           "weight": t["bias"], "bias": t["bias"]}  # fmt: skip
    apart = {name: value.clone() for name, value in one.items()}
    assert torch.equal(call("bank", one, 2), call("bank", apart, 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 3, 4), (2, 3, 0), (2, 3, 0, 5), (0, 0)], ids=str)  # fmt: skip
def test_empty(op, shape, shared, device, dtype):
    tensors = make(op, shape, 3, shared=shared, dtype=dtype, device=device)
    for value in tensors.values():
        value.requires_grad_()
    y = call(op, tensors, 3, shared=shared, activation="relu")
    assert y.shape == (3 * shape[0], *shape[1:]) and y.dtype == dtype
    y.sum().backward()
    for value in tensors.values():
        assert value.grad is not None and torch.count_nonzero(value.grad) == 0


def test_threads_meet_no_state(device):
    """16 Python threads, each with its own seed, against the calls one after another."""
    t = make("normal", (8, 16, 9), 4, dtype=torch.float32, device=device)

    def run(key):
        seed = ops.new_seed(key, 0, device)
        return ops.batch_norm_fitted(t["x"], t["params"], seed, 0, 4, "normal")

    expected = [run(key) for key in range(64)]
    with ThreadPoolExecutor(16) as pool:
        for actual, e in zip(pool.map(run, range(64)), expected, strict=True):
            assert torch.equal(actual, e)


@pytest.mark.parametrize("op", OPS)
def test_number_of_threads_does_not_matter(op, set_threads):
    t = make(op, (64, 33, 40), 4, dtype=torch.float32)
    expected = call(op, t, 4)
    for count in (1, 16):
        set_threads(count)
        assert torch.equal(call(op, t, 4), expected)


def test_more_than_2_to_the_31_elements(device):
    rows, C, T = 1 << 11, 1 << 10, (1 << 10) + 1
    if device.type == "cpu" and "BNUQ_LARGE" not in os.environ:
        pytest.skip("4.3 GB of fresh memory, 10 s and more: set BNUQ_LARGE=1")
    x = torch.ones(rows, C, dtype=torch.bfloat16, device=device)
    mean = torch.arange(8.0, device=device)[:, None].repeat(1, C)
    snapshot = torch.arange(T, device=device) % 8
    y = ops.batch_norm_bank(x, mean, torch.ones_like(mean), snapshot=snapshot, eps=0.0, shared=True)
    assert y.numel() > 2**31
    ends = y.view(T, rows, C)[:, [0, -1]][:, :, [0, -1]].cpu()
    assert torch.equal(ends, (1 - snapshot.cpu()).bfloat16()[:, None, None].expand_as(ends))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype,rows", [(torch.float32, 110), (torch.bfloat16, 220)])
def test_a_result_beyond_the_caches_has_the_bits_of_its_parts(dtype, rows, channels_last):
    """Above 64 MB it is stored past the caches: from the first aligned sixteen of a plane on."""
    T, shape = 2, (rows, 33, 37, 21)
    tensors = make("bank", shape, T, dtype=dtype, channels_last=channels_last)
    whole = tensors["x"]
    memory = torch.empty(whole.numel() + 3, dtype=dtype)[3:]
    out = memory.as_strided(whole.shape, whole.stride(), memory.storage_offset())
    call("bank", tensors, T, activation="relu", out=out)
    for t in range(T):
        part = {k: v.chunk(T)[t] if k in ("x", "residual") else v for k, v in tensors.items()}
        seed, mean, var = ops.new_seed(KEY, FIRST + t), part.pop("mean"), part.pop("var")
        options = dict(num_samples=1, activation="relu")
        y = ops.batch_norm_bank(part.pop("x"), mean, var, seed, **part, **options)
        assert torch.equal(out.chunk(T)[t], y)


def test_shared_blocks_and_replicas_with_a_common_divisor(device):
    generator, T = torch.Generator().manual_seed(0), 4
    x = torch.randn(8, 16, 32, 32, generator=generator).to(device)
    mean, var = (torch.rand(2, T, 16, generator=generator) + 0.1).to(device)
    statistics = {"mean": mean, "var": var, "snapshot": torch.arange(T, device=device)}
    together = ops.batch_norm_bank(x, **statistics, shared=True)
    assert torch.equal(together, ops.batch_norm_bank(x.repeat(T, 1, 1, 1), **statistics))


def test_a_view_of_one_row_keeps_channels_last(device):
    x = torch.randn(2, 6, 3, 3, device=device).contiguous(memory_format=torch.channels_last)[::2]
    statistics = torch.zeros(1, 6, device=device), torch.ones(1, 6, device=device)
    snapshot = torch.zeros(1, dtype=torch.int64, device=device)
    y = ops.batch_norm_bank(x, *statistics, snapshot=snapshot)
    assert y.is_contiguous(memory_format=torch.channels_last)
