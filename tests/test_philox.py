"""Counter-based random numbers: the frozen contract, and the op against the float64 recipe."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bnuq_ext import ops, reference
from bnuq_ext.ops.philox import TAGS

FROZEN = json.loads((Path(__file__).parent / "data" / "random_numbers.json").read_text())

# Of the vectorised float32 normals against the float64 recipe. The radius is at most 6.66, its
# logarithm and the polynomials are good to a few units in the last place.
NORMAL_ATOL = 3e-6


def assert_normals(z, expected, device):
    """To NORMAL_ATOL; on CUDA to what its approximate instructions leave of the float64 recipe.

    lg2.approx is off by up to 2^-22 near 1, so a radius r by 2^-22 / 2r, which is 2e-7 / |z| at the
    most of z and never above 1e-3; the cosine of up to 2 pi is off by 1e-6, and r at most 6.7.
    """
    error, bound = (z.double().cpu() - expected).abs(), torch.tensor(NORMAL_ATOL)
    if device.type == "cuda":
        bound = 1e-5 + (2e-7 / expected.abs()).clamp(max=1e-3)
    assert (error <= bound).all(), f"off by {error.max()}"


# Salmon et al.'s known answers for Philox4x32-10 (Random123): key, counter, words.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 2,
        (0xFFFFFFFF,) * 4,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


# ---- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("key, counter, words", KNOWN_ANSWERS)
def test_philox_known_answers(key, counter, words, philox_driver):
    assert reference.philox(key, counter).tolist() == list(words)
    assert philox_driver("philox", *key, *counter) == list(words)


@pytest.mark.parametrize("case", FROZEN["words"], ids=lambda c: f"{c['key']}-{c['tag']}")
def test_words_are_frozen(case, philox_driver):
    place = [case[name] for name in ("key", "stream", "tag", "replica", "index")]
    assert reference.words(*place).tolist() == case["words"]
    place[2] = reference.TAGS[case["tag"]]
    assert philox_driver("words", *place) == case["words"]


@pytest.mark.parametrize("case", FROZEN["vectors"], ids=lambda c: f"{c['key']}-{c['tag']}")
def test_vector_normals_are_frozen(case, device):
    expected = torch.tensor(case["normals"], dtype=torch.float64)
    seed = ops.new_seed(case["key"], case["first_replica"], device)
    z = ops.philox_normal(seed, case["stream"], expected.shape, tag=case["tag"])
    assert_normals(z, expected, device)


@pytest.mark.parametrize("case", FROZEN["weights"], ids=lambda c: str(c["key"]))
def test_weight_normals_are_frozen(case, device):
    seed = ops.new_seed(case["key"], case["first_replica"], device)
    z = ops.philox_normal(seed, case["stream"], case["shape"])
    actual = torch.stack([z[tuple(place)] for place in case["places"]])
    expected = torch.tensor(case["normals"], dtype=torch.float64)
    assert_normals(actual, expected, device)


@pytest.mark.parametrize("case", FROZEN["snapshots"], ids=lambda c: str(c["num_snapshots"]))
def test_snapshots_are_frozen(case, device):
    seed = ops.new_seed(case["key"], case["first_replica"], device)
    expected = case["snapshots"]
    assert ops.snapshot_indices(seed, case["num_snapshots"], len(expected)).tolist() == expected


# ---- the op against the recipe -----------------------------------------------------------------


@pytest.mark.parametrize("key, first", [(0, 0), (-5, 2**33 + 1), (2**62 + 12345, 1)])
@pytest.mark.parametrize("shape", [(3, 1), (2, 7), (3, 256), (2, 1000), (1, 1 << 16)], ids=str)
def test_vectors_match_reference(shape, key, first, device):
    for tag in ("bias", "mean", "spread", "joint"):
        z = ops.philox_normal(ops.new_seed(key, first, device), 2**31 + 9, shape, tag=tag)
        expected = reference.vector_normals(key, first, 2**31 + 9, tag, shape)
        assert_normals(z, expected, device)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 16, 16), (3, 21, 9), (3, 5, 300), (2, 33, 41), (1, 9, 1050)], ids=str
)
def test_weights_match_reference(shape, device):
    key, first, stream = -7, 2**33 + 3, 2**31 + 2
    z = ops.philox_normal(ops.new_seed(key, first, device), stream, shape)
    expected = reference.weight_normals(key, first, stream, "weight", shape)
    assert_normals(z, expected, device)


@pytest.mark.parametrize("form", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("tile_o, o, tile, calls", [(0, 0, 0, 8), (1, 2, 32, 40), (3, 5, 16, 64), (2**31, 7, 2**26 - 16, 64)])  # fmt: skip
def test_words_of_weights_on_every_processor(tile_o, o, tile, calls, form, philox_driver):
    """Rows o and o + 8 of a band, half a tile after the other."""
    key, replica = -7, 2**40 + 3
    words = philox_driver("tiles", form, key, 2, replica, tile_o, o, tile, calls)
    if not words:
        pytest.skip(f"this processor has no {form}")
    actual = torch.tensor(words)
    lanes = torch.arange(calls)
    index = (tile_o << 32) + 32 * (tile + lanes // 4) + 4 * o + lanes % 4
    words = torch.from_numpy(
        reference.words(key, 2, "weight", replica, index.numpy()).astype("int64")
    )
    left, right = words[:, :2].view(-1, 4, 2), words[:, 2:].view(-1, 4, 2)
    for row in (0, 1):
        expected = torch.stack([left[:, :, row], right[:, :, row]], 1).flatten()
        assert torch.equal(actual.view(2, -1)[row], expected)


@pytest.mark.parametrize("num_snapshots", [1, 2, 3, 15, 16, 17, 1000, 65537, 2**31 - 1])
@pytest.mark.parametrize("key, first", [(0, 0), (-5, 2**33 + 1)])
def test_snapshots_match_reference(num_snapshots, key, first, device):
    actual = ops.snapshot_indices(ops.new_seed(key, first, device), num_snapshots, 100)
    expected = reference.snapshot_indices(key, first, num_snapshots, 100)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("num_snapshots", [1, 2, 3, 64, 1000, 65537])
def test_every_epoch_is_a_permutation(num_snapshots, device):
    T = max(2 * num_snapshots, 1000 // num_snapshots * num_snapshots)
    epochs = ops.snapshot_indices(ops.new_seed(3, 0, device), num_snapshots, T)
    epochs = epochs.view(-1, num_snapshots).cpu()
    assert torch.equal(epochs.sort(1).values, torch.arange(num_snapshots).expand_as(epochs))


@pytest.mark.parametrize("shape", [(20, 37), (20, 33, 18)], ids=str)
def test_draws_do_not_depend_on_chunks(shape, device):
    whole = ops.philox_normal(ops.new_seed(4, 0, device), 1, shape)
    parts = [
        ops.philox_normal(ops.new_seed(4, first, device), 1, (count, *shape[1:]))
        for first, count in [(0, 1), (1, 12), (13, 7)]
    ]
    assert torch.equal(torch.cat(parts), whole)
    snapshots = ops.snapshot_indices(ops.new_seed(4, 0, device), 7, 20)
    assert torch.equal(ops.snapshot_indices(ops.new_seed(4, 13, device), 7, 7), snapshots[13:])


def test_draws_do_not_depend_on_threads(set_threads):
    def draw():
        return ops.philox_normal(ops.new_seed(4), 1, (64, 1000))

    expected = draw()
    set_threads(16)
    assert torch.equal(draw(), expected)


def test_empty(device):
    seed = ops.new_seed(0, 0, device)
    for shape in [(0, 3), (3, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        assert ops.philox_normal(seed, 0, shape).shape == shape
    assert ops.snapshot_indices(seed, 3, 0).shape == (0,)


def test_new_seed_without_a_key_follows_torchs_generator(device):
    torch.manual_seed(5)
    first, second = ops.new_seed(device=device), ops.new_seed(first_replica=3, device=device)
    torch.manual_seed(5)
    assert torch.equal(ops.new_seed(device=device), first)
    assert first.dtype == torch.int64 and first[1] == 0 and second[1] == 3
    assert first[0] != second[0]


# ---- torch.library -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(2, 5), (2, 17, 3), (0, 4)], ids=str)
def test_opcheck(shape, device):
    seed = ops.new_seed(3, 0, device)
    torch.library.opcheck(torch.ops.bnuq.philox_normal.default, (seed, 1, 2, shape))
    torch.library.opcheck(torch.ops.bnuq.snapshot_indices.default, (seed, 5, shape[0]))


def draw_everything(seed):
    noise = ops.philox_normal(seed, 4, (3, 10)) + 1
    return noise, ops.snapshot_indices(seed, 5, 4) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    seed = ops.new_seed(3, 0, device)
    compiled = torch.compile(draw_everything, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(seed), draw_everything(seed), strict=True):
        torch.testing.assert_close(actual, expected)
    assert not torch.equal(compiled(ops.new_seed(4, 0, device))[0], compiled(seed)[0])


@pytest.mark.filterwarnings("ignore")
def test_export(device):
    class Draws(torch.nn.Module):
        def forward(self, seed):
            return draw_everything(seed)

    seed = ops.new_seed(3, 0, device)
    exported = torch.export.export(Draws(), (seed,)).module()
    for actual, expected in zip(exported(seed), draw_everything(seed), strict=True):
        assert torch.equal(actual, expected)


# ---- errors ------------------------------------------------------------------------------------

SEED = torch.tensor([1, 0])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: ops.philox_normal([1, 0], 0, (2, 3)),
            TypeError,
            "philox_normal: seed must be an integer or a tensor, got list",
        ),
        (
            lambda: ops.philox_normal(SEED.int(), 0, (2, 3)),
            TypeError,
            "philox_normal: seed must be int64, got torch.int32",
        ),
        (
            lambda: ops.philox_normal(SEED[:1], 0, (2, 3)),
            ValueError,
            "philox_normal: seed must have shape [2], got [1]",
        ),
        (
            lambda: ops.philox_normal(SEED, 0, (2,)),
            ValueError,
            "philox_normal: shape must have 2 or 3 entries, got (2,)",
        ),
        *(
            (
                lambda shape=shape: ops.philox_normal(SEED, 0, shape),
                TypeError,
                f"philox_normal: shape must be a tuple of integers, got {shape!r}",
            )
            for shape in (3, "ab", (1.5, 2))
        ),
        (
            lambda: ops.philox_normal(SEED, 0, (2, -1)),
            ValueError,
            "philox_normal: shape must not be negative, got (2, -1)",
        ),
        (
            lambda: ops.philox_normal(SEED, -1, (2, 3)),
            ValueError,
            "philox_normal: stream must lie in [0, 2^32), got -1",
        ),
        (
            lambda: ops.philox_normal(SEED, 2**32, (2, 3)),
            ValueError,
            "philox_normal: stream must lie in [0, 2^32), got 4294967296",
        ),
        (
            lambda: ops.philox_normal(SEED, 1.5, (2, 3)),
            TypeError,
            "philox_normal: stream must be an integer, got 1.5",
        ),
        (
            lambda: ops.philox_normal(SEED, 0, (2, 3), tag="noise"),
            ValueError,
            f"philox_normal: tag must be one of {', '.join(TAGS)}, got 'noise'",
        ),
        (
            lambda: ops.new_seed(1.5),
            TypeError,
            "new_seed: seed must be an integer, got 1.5",
        ),
        (
            lambda: ops.new_seed(True),
            TypeError,
            "new_seed: seed must be an integer, got True",
        ),
        (
            lambda: ops.new_seed(2**63),
            ValueError,
            "new_seed: seed must lie in [-2^63, 2^63), got 9223372036854775808",
        ),
        (
            lambda: ops.new_seed(0, -1),
            ValueError,
            "new_seed: first_replica must lie in [0, 2^63), got -1",
        ),
        (
            lambda: ops.new_seed(0, torch.tensor(3)),
            TypeError,
            "new_seed: first_replica must be an integer, got tensor(3)",
        ),
        (
            lambda: ops.new_seed(torch.tensor(3)),
            ValueError,
            "new_seed: seed must be an integer or have shape [1] and dtype int64, got [] torch.int64",
        ),
        (
            lambda: ops.new_seed(torch.tensor([3.0])),
            ValueError,
            "new_seed: seed must be an integer or have shape [1] and dtype int64, got [1] torch.float32",
        ),
        (
            lambda: ops.snapshot_indices(SEED, 0, 3),
            ValueError,
            "snapshot_indices: num_snapshots must lie in [1, 2^31), got 0",
        ),
        (
            lambda: ops.snapshot_indices(SEED, 2**31, 3),
            ValueError,
            "snapshot_indices: num_snapshots must lie in [1, 2^31), got 2147483648",
        ),
        (
            lambda: ops.snapshot_indices(SEED, 3, -1),
            ValueError,
            "snapshot_indices: num_samples must lie in [0, 2^63), got -1",
        ),
        (
            lambda: ops.snapshot_indices(SEED, None, 3),
            TypeError,
            "snapshot_indices: num_snapshots must be an integer, got None",
        ),
        (
            lambda: ops.snapshot_indices(SEED, 3, 1.5),
            TypeError,
            "snapshot_indices: num_samples must be an integer, got 1.5",
        ),
    ],
)
def test_rejects(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_shapes_of_other_kinds():
    expected = ops.philox_normal(SEED, 0, (2, 3))
    for shape in ([2, 3], torch.Size([2, 3]), range(2, 4), np.array([2, 3])):
        assert torch.equal(ops.philox_normal(SEED, 0, shape), expected)
