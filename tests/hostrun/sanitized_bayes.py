"""The Bayesian kernels on awkward shapes, for sanitized_case.py."""

import itertools

import numpy as np

from .calls import STORAGE, fresh, placed

# N, O, I. Three pieces of 64 columns, as of x so of grad_y, and of 64 rows; few rows by warps that
# share a tile.
SHAPES = [(1, 1, 1), (5, 17, 140), (9, 140, 33), (33, 140, 140), (130, 20, 20)]
DIRECT_SHAPES = [(1, 17, 33), (9, 40, 20)]
REST = {"first": 0, "matrix": False, "prior_std": 1.0, "pi": 0.5, "std1": 1.0, "std2": 0.1}


def zeros(shape, dtype):
    array = fresh(shape, dtype)
    array[...] = 0
    return array


def run(kernels, name, dtype, results, off=0, **arguments):
    """`results` are the arrays that the kernel writes, by name; `off` is where the others begin."""
    arguments = {
        k: placed(v, off) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    call = REST | {"T": 2, "N": 0, "shared": False, "stream": 7, "seed": np.array([1, 2])}
    call |= arguments | results | {"kernel": name, "dtype": dtype}
    kernels.call("bayes", list(results.values()), **call)


def run_products(kernels, random_bits, random, dtype, shape, shared):
    """The products with weights made in registers; an operand's rows are padded to 16."""
    (N, O, I), T, one = shape, 2, np.ones((), np.float32)  # noqa: E741
    O16, I16 = (-(-size // 16) * 16 for size in (O, I))
    first = 1 if shared else T
    sizes = {"N": N, "O": O, "I": I, "shared": shared}
    common = {"x_scale": one, "sigma_scale": one, "grad_scale": one}
    rho, sigma = random.random((O, I)).astype(np.float32), fresh((O16 * I16,), np.uint16)

    grad, x = (random.random((n, N, m)).astype(np.float32) for n, m in ((T, O), (first, I)))
    results = {"out": fresh((T, N, O16), np.uint16), "out2": fresh((first, N, I16), np.uint16)}
    results |= {"out3": sigma, "out4": fresh((3,), np.float32)}
    results |= {"partial": fresh((3, 512), np.float32)}
    run(kernels, "operands", dtype, results, int(shared), grad=grad, x=x, rho=rho, **sizes)
    noise = {"out": fresh((T, O, I16), np.uint16)}
    run(kernels, "sample_noise", dtype, noise, sigma=sigma, O=O, I=I16)

    given = (
        common
        | sizes
        | {"I": I16, "sigma": sigma, "x": random_bits(random, (first, N, I16), dtype)}
    )
    bias = np.zeros((O,), np.float32)
    given |= {"base": np.zeros((T, N, O), np.float32), "bias": bias, "bias_rho": bias}
    run(kernels, "forward", dtype, {"out": fresh((T, N, O), np.float32)}, **given)

    given = (
        common | sizes | {"O": O16, "sigma": sigma, "grad": random_bits(random, (T, N, O16), dtype)}
    )
    run(kernels, "grad_x", dtype, {"out": zeros((first, N, I), np.float32)}, **given)

    given = common | sizes | {"grad": random_bits(random, (T, N, O16), dtype)}
    given |= {"x": random_bits(random, (first, N, I16), dtype), "rho": rho}
    run(kernels, "grad_rho", dtype, {"out": fresh((O, I), np.float32)}, **given)


def run_divergences(kernels, random, dtype, shape):
    _, O, I = shape  # noqa: E741
    acc = STORAGE[dtype]
    mu, rho = random.random((2, O, I)).astype(acc)
    sizes = {"O": O, "I": I, "mu": mu, "rho": rho, "matrix": True}
    for name in ("gaussian_kl", "mixture_kl"):
        results = {"out": fresh((), acc), "partial": fresh((1024,), np.float64)}
        run(kernels, name, dtype, results, **sizes)
        results = {name: zeros((O, I), acc) for name in ("out", "out2")}
        run(kernels, f"{name}_backward", dtype, results, grad=np.ones((), acc), **sizes)


def run_direct(kernels, random, dtype, shape, shared):
    """The products straight from mu and rho; one replica, then more than a warp takes."""
    (N, O, I), acc = shape, STORAGE[dtype]  # noqa: E741
    for T in (1, 5):
        mu, rho, bias = (random.random(s).astype(acc) for s in ((O, I), (O, I), (O,)))
        copies = 1 if shared or T == 1 else T
        x, grad = (random.random(s).astype(acc) for s in ((copies, N, I), (T, N, O)))
        given = {"mu": mu, "rho": rho, "bias": bias, "bias_rho": bias, "x": x, "grad": grad}
        given |= {"T": T, "N": N, "O": O, "I": I, "shared": copies == 1}
        run(kernels, "direct_forward", dtype, {"out": fresh((T, N, O), acc)}, **given)
        shapes = {"out": (O, I), "out2": (O, I), "out3": (O,), "out4": (O,)}
        results = {name: fresh(size, acc) for name, size in shapes.items()}
        run(kernels, "direct_grad_weight", dtype, results, **given)
        run(kernels, "direct_grad_x", dtype, {"out": fresh((T, N, I), acc)}, **given)


def run_all(kernels, random_bits, random):
    for kernels.order, shape in enumerate(SHAPES):
        # Which access the same: either form of x by one of them.
        for dtype, shared in (("float16", True), ("bfloat16", False)):
            run_products(kernels, random_bits, random, dtype, shape, shared)
        for dtype in ("float32", "float64"):
            run_divergences(kernels, random, dtype, shape)
    for kernels.order, shape in enumerate(DIRECT_SHAPES):
        for dtype, shared in itertools.product(("float32", "float64"), (True, False)):
            run_direct(kernels, random, dtype, shape, shared)
