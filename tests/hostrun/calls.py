"""The host-run kernels as functions that return arrays; numpy only,
so that they run under sanitizers.

Arrays of 16-bit floats are uint16. A result starts as NaN between guards, which every call checks
afterwards; `offset` puts tensors off a 16-byte boundary.
"""

import numpy as np

STORAGE = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.uint16,
    "bfloat16": np.uint16,
}
FAMILIES = {"normal": 0, "lognormal": 1}
GUARD = 64  # bytes on either side


def acc_of(dtype):
    return np.float64 if dtype == "float64" else np.float32


ACTIVATIONS = ("x", "residual", "y", "grad_y", "grad_x", "grad_residual")


def fresh(shape, dtype, offset=0):
    """An array of set bits (NaN in every format), `offset` elements behind a 16-byte boundary."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + 2 * GUARD + offset * dtype.itemsize + 16, 0xFF, np.uint8)
    start = GUARD + offset * dtype.itemsize + -raw.ctypes.data % 16
    return raw[start : start + size].view(dtype).reshape(shape)


def placed(array, offset=0):
    """A copy of an array, `offset` elements behind a 16-byte boundary; None stays None.

    It ends where its allocation ends, so that AddressSanitizer sees every read beyond it.
    """
    if array is None:
        return None
    raw = np.empty(array.size + offset, array.dtype)
    assert raw.ctypes.data % 16 == 0
    copy = raw[offset:].reshape(array.shape)
    copy[...] = array
    return copy


def check_guards(array):
    """Fails if a kernel wrote beside an array that `fresh` made."""
    raw = array
    while raw.base is not None:
        raw = raw.base
    start = array.ctypes.data - raw.ctypes.data
    assert (raw[:start] == 0xFF).all() and (raw[start + array.nbytes :] == 0xFF).all()


class Kernels:
    """The kernels of one module. `order` seeds the shuffling of threads; 0 keeps them in order."""

    def __init__(self, module, order=0):
        self.module = module
        self.order = order

    def call(self, name, results, **arguments):
        self.module.set_order(self.order)
        try:
            getattr(self.module, name)(**arguments)
        finally:
            self.module.set_order(0)
        for array in results:
            check_guards(array)
        return results[0] if len(results) == 1 else results

    # ---- philox --------------------------------------------------------------------------------

    def philox_normal(self, seed, stream, shape, tag):
        out = fresh(shape, np.float32)
        return self.call("philox_normal", [out], out=out, seed=seed, stream=stream, tag=tag)

    def snapshot_indices(self, seed, num_snapshots, num_samples):
        out = fresh((num_samples,), np.int64)
        return self.call("snapshot_indices", [out], out=out, seed=seed, B=num_snapshots)

    # ---- batch norm ----------------------------------------------------------------------------

    def batch_norm(self, dtype, x, num_samples, source, *, off=(), residual=None, **options):
        """y (T, N, C, S) of x (N, C, S), shared, or (T, N, C, S).

        Args:
            source: {"mean", "var" (B, C), "seed" or "snapshot"} or {"params" (4, C), "seed",
                "stream", "family"}.
            off: names of what lies an element behind a 16-byte boundary.
            options: weight, bias, eps, slope (1 without activation).
        """
        y = fresh((num_samples, *x.shape[-3:]), STORAGE[dtype], "y" in off)
        arguments = batch_norm_arguments(dtype, x, num_samples, source, off=off, **options)
        arguments |= {"x": placed(x, "x" in off), "residual": placed(residual, "residual" in off)}
        return self.call("batch_norm", [y], **arguments, y=y)

    def batch_norm_backward(
        self, dtype, grad_y, x, y, num_samples, source, *, off=(), need=(1, 1, 1), **options
    ):
        """(grad_x, grad_residual, sums), None for what is not needed;
        `x` tells whether it is shared."""
        arguments = batch_norm_arguments(dtype, x, num_samples, source, off=off, **options)
        storage, channels = STORAGE[dtype], x.shape[-2]
        results = [
            fresh(x.shape, storage, "grad_x" in off) if need[0] else None,
            fresh(x.shape, storage, "grad_residual" in off) if need[1] else None,
            fresh((2, num_samples, channels), acc_of(dtype)) if need[2] else None,
        ]
        arguments |= dict(zip(("grad_x", "grad_residual", "sums"), results, strict=True))
        given = {"grad_y": grad_y, "y": y, "x": x if need[2] else None}
        arguments |= {name: placed(array, name in off) for name, array in given.items()}
        self.call("batch_norm_backward", [r for r in results if r is not None], **arguments)
        return results

    # ---- predictive ----------------------------------------------------------------------------

    def predictive(self, dtype, logits):
        """(mean, variance, entropy, expected_entropy) of logits (T, N, K, S)."""
        state = [fresh(shape, acc_of(dtype)) for shape in state_shapes(logits)]
        entropy = fresh(state[2].shape, acc_of(dtype))
        arguments = state_arguments(dtype, logits, state, 0) | {"entropy": entropy}
        self.call("predictive", [*state, entropy], **arguments)
        return state[0], state[1], entropy, state[2]

    def predictive_accumulate(self, dtype, logits, state, count):
        """The state (mean, m2, expected_entropy) after more replicas;
        with count 0 it is not read."""
        before, state = state, [fresh(array.shape, array.dtype) for array in state]
        for own, array in zip(state, before, strict=True):
            own[...] = array
        return self.call("predictive", state, **state_arguments(dtype, logits, state, count))

    def predictive_backward(self, dtype, logits, mean, grads):
        """grad_logits; `grads` of (mean, variance, entropy, expected_entropy), each may be None."""
        out = fresh(logits.shape, STORAGE[dtype])
        arguments = state_arguments(dtype, logits, [placed(mean), None, None], 0)
        names = ("grad_mean", "grad_variance", "grad_entropy", "grad_expected_entropy")
        arguments |= {name: placed(grad) for name, grad in zip(names, grads, strict=True)}
        arguments["grad_logits"] = out
        return self.call("predictive_backward", [out], **arguments)


def batch_norm_arguments(
    dtype, x, num_samples, source, *, off=(), eps=1e-5, slope=1.0, **parameters
):
    shared = x.ndim == 3
    rows, channels, positions = x.shape[-3:]
    arguments = {"dtype": dtype, "T": num_samples, "N": rows, "C": channels, "S": positions}
    arguments |= {"shared": shared, "eps": eps, "slope": slope, "B": 0, "stream": 0, "family": 0}
    tables = source | parameters
    arguments |= {
        k: placed(v, k in off) if isinstance(v, np.ndarray) else v for k, v in tables.items()
    }
    if "mean" in source:
        arguments["B"] = len(source["mean"])
    else:
        arguments["family"] = FAMILIES[source["family"]]
    return arguments


def state_shapes(logits):
    shape = logits.shape[1:]
    return shape, shape, (shape[0], shape[2])


def state_arguments(dtype, logits, state, count):
    num_samples, rows, classes, positions = logits.shape
    arguments = {"dtype": dtype, "T": num_samples, "N": rows, "K": classes, "S": positions}
    arguments |= dict(zip(("mean", "m2", "expected_entropy"), state, strict=True))
    return arguments | {"logits": placed(logits), "count": count}
