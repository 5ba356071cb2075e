"""How many replicas go through a model at a time, and what happens when memory does not suffice."""

import torch
from torch import Tensor

from .ops.checks import check_integer, refuse

# Small chunks call every layer more often, large ones outgrow the caches: a ResNet-18 on 32 rows takes
# 1.00 of the loop's time in chunks of 8 MB, 0.98 with 16 MB, 1.00 with 32 MB, 1.06 with 40 MB, a
# ResNet-50 on 2 rows 1.00 and 0.90 with 6 and 12 MB.
CPU_BYTES = 16 * 2**20
# On a GPU larger chunks only fill it better: on an H200 a ResNet-50 on 256 rows in 16 bits takes 299 ms
# with 0.4 GB, 259 with 1.6 GB, 254 with 2.9 GB, and plain PyTorch 258 for all in one.
CUDA_BYTES = 2 * 2**30
# Times as much for activations that are no input of a stochastic layer. Memory binds these, not the
# cache, and the smaller the chunks the more often is computed what all replicas share.
OTHERS = 8
# Through torch's C interface, which our ops allocate by,
# some of its versions lose what an exception said.
_ALLOCATIONS = (
    "aten::empty",
    "aten::new_empty",
    "aten::new_zeros",
    "aten::contiguous",
    '"aten::to"',
    '"aten::sum"',
    '"aten::reshape"',
    "aoti_torch_cpu_",
    "torch_parallel_for",
)
# The last three of cuDNN and of cuBLAS.
_SAID = (
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "unable to find an engine to execute",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def check_chunk(op: str, chunk) -> None:
    """Checks that a chunk is "auto" or at least 1."""
    if not isinstance(chunk, str):
        check_integer(op, "chunk", chunk, 1)
    elif chunk != "auto":
        refuse(op, "chunk", 'be "auto" or at least 1', repr(chunk))


def chunk_of(largest: int, chunk: int | str, num_samples: int, device: torch.device) -> int:
    """Replicas in a chunk: at most the given number,
    or as many as keep the largest activation small.

    Args:
        largest: bytes of one replica's largest activation, as `Plan` counts it.
        chunk: "auto" or a number.
        num_samples: T; the chunks are about equally large.
        device: where the model runs; on CUDA a sixteenth of the free memory is a bound too.
    """
    if chunk == "auto":
        budget = CPU_BYTES
        if device.type == "cuda":
            budget = min(CUDA_BYTES, _free_bytes(device) // 16)
        chunk = budget // max(largest, 1)
    num_chunks = -(-num_samples // max(int(chunk), 1))  # rounded up
    return -(-num_samples // num_chunks)


def _free_bytes(device: torch.device) -> int:
    """Those of a GPU that are free, and those that torch has freed and keeps."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory did not suffice, on CUDA or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    lost = "API call failed" in text and any(call in text for call in _ALLOCATIONS)
    return isinstance(error, RuntimeError) and (lost or any(words in text for words in _SAID))


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory, or the stack of a deep caller, did not suffice: it may
    the next time."""
    return isinstance(error, RecursionError) or is_out_of_memory(error)


def free_memory(device: torch.device) -> None:
    """Gives memory that torch keeps in reserve back, so that a smaller chunk finds room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def out_of_memory(op: str, rows: int, error: BaseException) -> torch.OutOfMemoryError:
    """The error for when not even one replica fits."""
    advice = f"; a loader with batches of {rows // 2} rows or fewer needs half" if rows > 1 else ""
    return torch.OutOfMemoryError(
        f"{op}: x must fit in memory with one replica at a time, got {rows} rows{advice} ({error})"
    )


def no_memory_to_keep(op: str, outputs: Tensor, count: int) -> torch.OutOfMemoryError:
    """The error for when as many outputs as those of all replicas (1, N, ...) do not fit."""
    size = outputs.numel() * outputs.element_size()
    return torch.OutOfMemoryError(
        f"{op}: keep_samples must be False unless the outputs of all replicas fit in memory, got True "
        f"for {count} replicas of {size} bytes"
    )
