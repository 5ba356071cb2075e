"""Every kernel on awkward shapes, in shuffled order: what runs under the sanitizers.

No torch here, which the sanitizers would slow down; the values are judged elsewhere.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from hostrun import build, sanitized_bayes
from hostrun.calls import ACTIVATIONS, STORAGE, Kernels, acc_of

BATCH_NORM = [
    (5, 6, 1),
    (3, 5, 49),
    (3, 4, 49),
    (2, 3, 512),
    (1, 2, 1096),
    (2, 3, 257),
    (2, 268, 1),
]
# Whether x is shared: numbers of 16 bits are accessed in the same way, either form by one of them.
FORMS = {"float16": [True], "bfloat16": [False], "float32": [True, False], "float64": [True, False]}
LOGITS = [
    (3, 5, 3, 1),
    (2, 37, 10, 1),
    (2, 3, 200, 1),
    (2, 2, 10, 20),
    (2, 2, 300, 1),
    (2, 1, 4097, 2),
]


def random_bits(random, shape, dtype):
    """Numbers between 1 and 2 as they lie in memory; the 16-bit ones by their exponent's bits."""
    if STORAGE[dtype] is np.uint16:
        one = 0x3C00 if dtype == "float16" else 0x3F80
        return (one + random.integers(0, 128, shape)).astype(np.uint16)
    return (1 + random.random(shape)).astype(STORAGE[dtype])


def run_batch_norm(kernels, random, dtype, shape, shared):
    num_samples, acc, channels = 2, acc_of(dtype), shape[1]
    size = shape if shared else (num_samples, *shape)
    x, residual = (random_bits(random, size, dtype) for _ in range(2))
    weight, bias = random.random((2, channels)).astype(acc)
    mean, var = random.random((2, 4, channels)).astype(acc)
    rows = {"seed": np.array([1, 2])} if dtype == "float64" else {"snapshot": np.array([3, -1])}
    bank = {"mean": mean, "var": var} | rows
    fitted = {"params": random.random((4, channels)).astype(acc), "seed": np.array([1, 2])}
    fitted |= {"stream": 3, "family": "lognormal"}
    for source, off in ((bank, ()), (fitted, ACTIVATIONS)):
        options = {"weight": weight, "off": off, "slope": 0.0}
        y = kernels.batch_norm(
            dtype, x, num_samples, source, residual=residual, bias=bias, **options
        )
        kernels.batch_norm_backward(dtype, y, x, y, num_samples, source, **options)


def run_predictive(kernels, random, dtype, shape):
    logits = random_bits(random, shape, dtype)
    mean, *rest = kernels.predictive(dtype, logits)
    grads = [np.ones_like(output) for output in (mean, *rest)]
    kernels.predictive_backward(dtype, logits, mean, grads)
    kernels.predictive_accumulate(dtype, logits, (mean, rest[0], rest[2]), 3)


def main():
    kernels = Kernels(build.load_file(build.BUILD / f"hostrun_{sys.argv[1]}.so"))
    random, seed = np.random.default_rng(0), np.array([7, 2])
    for shape in [(2, 19), (2, 5, 7), (1, 33, 40)]:
        kernels.philox_normal(seed, 1, shape, 0)
    kernels.snapshot_indices(seed, 5, 300)
    for kernels.order, dtype in enumerate(STORAGE):
        for shape, shared in itertools.product(BATCH_NORM, FORMS[dtype]):
            run_batch_norm(kernels, random, dtype, shape, shared)
        for shape in LOGITS:
            run_predictive(kernels, random, dtype, shape)
    sanitized_bayes.run_all(kernels, random_bits, random)
    print("every kernel ran")


if __name__ == "__main__":
    main()
