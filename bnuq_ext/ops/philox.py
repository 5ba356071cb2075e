"""Counter-based random numbers: the noise of every other op, as a tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_key_range, check_one_of, check_seed, check_stream, check_within, refuse

TAGS = {"weight": 0, "bias": 1, "mean": 2, "spread": 3, "joint": 5, "local": 6}


def new_seed(
    seed: int | Tensor | None = None, first_replica: int = 0, device: torch.types.Device = "cpu"
) -> Tensor:
    """The seed tensor of an op: (key, number of the first replica).

    Args:
        seed: the key, an integer in [-2^63, 2^63), or (1,) int64 on `device`;
            None draws it from torch's generator of `device`.
        first_replica: number of the first replica; at least 0.
        device: where the op runs.

    Returns:
        (2,) int64 on `device`.

    Raises:
        ValueError, TypeError: seed or first_replica out of range, or no integer.
    """
    check_within("new_seed", "first_replica", first_replica, 0, 2**63, "[0, 2^63)")
    key = new_key(device) if seed is None else seed
    if isinstance(key, Tensor):
        if key.shape != (1,) or key.dtype != torch.int64:
            got = f"{list(key.shape)} {key.dtype}"
            refuse("new_seed", "seed", "be an integer or have shape [1] and dtype int64", got)
    else:
        check_key_range("new_seed", key)
        key = torch.full((1,), int(key), dtype=torch.int64, device=device)
    # Filled on the device: a copy to it would wait, and a CUDA graph takes none.
    return torch.cat([key, key.new_full((1,), first_replica)])


def new_key(device: torch.types.Device) -> Tensor:
    """(1,) int64 from torch's generator of `device`."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def seed_tensor(seed: int | Tensor, device: torch.types.Device = "cpu") -> Tensor:
    """An op's seed as the (2,) of `new_seed`, contiguous: of an integer the key, from replica 0 on."""
    return seed.contiguous() if isinstance(seed, Tensor) else new_seed(seed, 0, device)


def philox_normal(
    seed: int | Tensor, stream: int, shape: Sequence[int], *, tag: str | None = None
) -> Tensor:
    """Standard normals, each a function of (key, stream, tag, replica, place) alone.

    Philox4x32-10, eight normals a call by Box-Muller with a 12-bit angle. For a shape (T, O, I) the
    noise of a weight matrix, in the order of 16x16 mma fragments; for (T, C) that of a vector.
    Row t belongs to replica `seed[1] + t`.

    Args:
        seed: (2,) int64, the key and the first replica; its device is the result's. Or an integer
            in [-2^63, 2^63), as `new_seed(seed)` on the CPU.
        stream: number of the stochastic layer; at least 0, below 2^32.
        shape: (T, O, I) or (T, C).
        tag: what the noise is for: "weight", "bias", "mean", "spread", "joint" or "local". By
            default "weight" for three dimensions and "mean" for two.

    Returns:
        float32 of `shape`, on the device of `seed`.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, value or dtype.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
    """
    check_seed("philox_normal", seed)
    several = hasattr(shape, "__iter__") and not isinstance(shape, Tensor)
    if not several or not all(hasattr(n, "__index__") for n in shape):
        refuse("philox_normal", "shape", "be a tuple of integers", repr(shape), TypeError)
    shape = tuple(shape)
    if len(shape) not in (2, 3):
        refuse("philox_normal", "shape", "have 2 or 3 entries", shape)
    if any(n < 0 for n in shape):
        refuse("philox_normal", "shape", "not be negative", shape)
    check_stream("philox_normal", stream)
    tag = tag if tag is not None else ("weight" if len(shape) == 3 else "mean")
    check_one_of("philox_normal", "tag", tag, TAGS)
    return torch.ops.bnuq.philox_normal(seed_tensor(seed), stream, TAGS[tag], shape)


def snapshot_indices(seed: int | Tensor, num_snapshots: int, num_samples: int) -> Tensor:
    """The snapshot of each replica: perm_e(t mod B), e = floor(t / B), t = `seed[1]`,
    `seed[1]` + 1, ...

    perm_e is a permutation of the B snapshots keyed by the seed,
    so every B replicas use each snapshot once.

    Args:
        seed: as in `philox_normal`.
        num_snapshots: B; at least 1, below 2^31.
        num_samples: T; at least 0.

    Returns:
        (T,) int64, on the device of `seed`.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, value or dtype.

    Source: Hoang, Morris and Rogaway, An Enciphering Scheme Based on a Card Shuffle (2012).
    """
    check_seed("snapshot_indices", seed)
    check_within("snapshot_indices", "num_snapshots", num_snapshots, 1, 2**31, "[1, 2^31)")
    check_within("snapshot_indices", "num_samples", num_samples, 0, 2**63, "[0, 2^63)")
    return torch.ops.bnuq.snapshot_indices(seed_tensor(seed), num_snapshots, num_samples)


@torch.library.register_fake("bnuq::philox_normal")
def _(seed, stream, tag, shape):
    return seed.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("bnuq::snapshot_indices")
def _(seed, num_snapshots, num_samples):
    return seed.new_empty((num_samples,))
