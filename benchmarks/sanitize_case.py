"""Every form of every CUDA kernel on small, awkward shapes: what compute-sanitizer runs.

    python benchmarks/sanitize_case.py [DEVICE [FAMILY ...]]

Inputs are made on the CPU and copied, so that hardly a kernel but ours runs under the tool. Another
device than "cuda" may be named, to try the script itself.
"""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bnuq_ext import ops
from bnuq_ext.ops.linear_ways import going

T, N, C, B = 3, 2, 5, 4
SHAPES = [(N, C), (3, C), (N, C, 7, 7), (N, C, 4, 4), (N, C, 1, 1), (N, C, 16, 16), (3, 16)]
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def made(*shape, dtype=torch.float32, positive=False):
    values = torch.rand(shape, dtype=torch.float64) + 0.5 if positive else torch.randn(shape)
    return values.to(dtype).to(DEVICE)


def laid_out(x, channels_last):
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def batch_norm_cases():
    for (rows, *shape), dtype, shared in itertools.product(SHAPES, DTYPES, (True, False)):
        for channels_last in (False, True) if len(shape) == 3 else (False,):
            size = (rows if shared else T * rows, *shape)
            x, residual = (
                laid_out(made(*size, dtype=dtype), channels_last).requires_grad_() for _ in range(2)
            )
            yield x, residual, {"shared": shared, "activation": "relu"}


def run_batch_norm():
    seed = torch.tensor([7, 3]).to(DEVICE)
    for x, residual, options in batch_norm_cases():
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        channels = x.shape[1]
        mean, var = made(B, channels, dtype=acc), made(B, channels, dtype=acc, positive=True)
        weight, bias = made(channels, dtype=acc), made(channels, dtype=acc)
        params = made(4, channels, dtype=acc, positive=True)
        for tensor in (mean, var, weight, bias, params):
            tensor.requires_grad_()
        options |= {"weight": weight, "bias": bias, "residual": residual}
        y = ops.batch_norm_bank(x, mean, var, seed, num_samples=T, **options)
        y.backward(torch.ones(y.shape).to(y))
        for family in ("normal", "lognormal"):
            y = ops.batch_norm_fitted(x, params, seed, 2, T, family, **options)
            y.backward(torch.ones(y.shape).to(y))


def run_predictive():
    shapes = [(T, N, 10), (T, N, 3, 5, 5), (T, 1, 1), (40, 3, 130)]
    shapes += [(T, 1, 33, 2), (T, N, 300), (T, 1, 4100)]  # columns of a block, a block, a wide one
    shapes += [(9, 1, 300), (8, 2, 3)]  # many replicas side by side
    for dtype, shape in itertools.product(DTYPES, shapes):
        logits = made(*shape, dtype=dtype).requires_grad_()
        sum(part.sum() for part in ops.predictive_statistics(logits)).backward()
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        mean, m2 = (torch.zeros(shape[1:], dtype=acc).to(DEVICE) for _ in range(2))
        entropy = torch.zeros(shape[1:2] + shape[3:], dtype=acc).to(DEVICE)
        ops.predictive_accumulate_(mean, m2, entropy, logits.detach(), 0)


def run_bayes():
    few = [(1, 1, 1), (5, 17, 33)]  # go direct, but the fused way has forms for them too
    more = [(9, 17, 33), (20, 7, 16), (33, 40, 20), (65, 3, 5)]
    run_products([torch.float32, torch.bfloat16, torch.float64], [*few, (9, 17, 33)])
    with going("sampled"):
        run_products([torch.float32, torch.bfloat16], [*few, (9, 18, 34)])
    with going("fused"):
        run_products([torch.float32, torch.float16, torch.bfloat16], [*few, *more])
        many = 352  # with three tiles of outputs enough warps for 128 rows each
        run_products([torch.float32, torch.bfloat16], [(65, 33, 5)], [many])
    seed = torch.tensor([7, 3]).to(DEVICE)
    for dtype in (torch.float32, torch.float64):
        mu, rho = (made(17, 33, dtype=dtype).requires_grad_() for _ in range(2))
        ops.gaussian_kl(mu, rho, 0.7).backward()
        ops.mixture_kl(mu, rho, seed, 1, T).backward()


def run_batched():
    """By themselves: most of it are products of torch's. Those of 16 bits that write by tensor maps
    the tools do not see (what reads their results finds them unwritten, the products of
    torch alone too), so these are in float32, which torch may be told, or of odd sizes."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    run_products([torch.float32, torch.float16], [(600, 16, 24)])
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    with going("batched"):
        run_products([torch.bfloat16], [(9, 17, 33)])


def run_products(dtypes, sizes, samples=(1, 3)):
    seed = torch.tensor([7, 3]).to(DEVICE)
    for dtype, num_samples, (rows, outputs, inputs) in itertools.product(dtypes, samples, sizes):
        for leading in ((), (num_samples,)):
            x = made(*leading, rows, inputs, dtype=dtype).requires_grad_()
            acc = torch.float64 if dtype == torch.float64 else torch.float32
            weights = [made(outputs, inputs, dtype=acc).requires_grad_() for _ in range(2)]
            biases = [made(outputs, dtype=acc).requires_grad_() for _ in range(2)]
            noise = {"seed": seed, "stream": 1, "num_samples": num_samples}
            y = ops.bayes_linear(x, *weights, *biases, **noise)
            y.backward(torch.ones(y.shape).to(y))


def run_philox():
    seed = torch.tensor([7, 3]).to(DEVICE)
    for shape in [(2, 33), (2, 17, 19), (1, 1, 1)]:
        ops.philox_normal(seed, 1, shape)
    ops.snapshot_indices(seed, 5, 12)


FAMILIES = {
    "philox": run_philox,
    "batch_norm": run_batch_norm,
    "predictive": run_predictive,
    "bayes": run_bayes,
    "batched": run_batched,
}


def main():
    torch.manual_seed(0)
    for name in sys.argv[2:] or FAMILIES:
        FAMILIES[name]()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
