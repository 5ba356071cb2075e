"""bayes_linear by the host run's kernels, put together as csrc/cuda does it on a GPU."""

import numpy as np
import torch

from . import build
from .calls import Kernels, fresh, placed

STREAM = 7
NOTHING = dict(
    T=0, N=0, O=0, I=0, first=0, shared=False, matrix=False, prior_std=1.0, pi=0.5, std1=1.0, std2=0.1,
    stream=STREAM,
)  # fmt: skip


def array(tensor):
    """A tensor's numbers as the host run takes them: 16-bit floats by their bits, aligned."""
    if tensor is None:
        return None
    tensor = tensor.detach().contiguous()
    tensor = tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
    return placed(tensor.numpy())


def replicas(x, weights):
    """(T or 1, N, I) in the dtype of the weights."""
    return (x if x.dim() == 3 else x[None]).to(weights.dtype)


class Direct:
    """bayes_linear the direct way. `order` shuffles the threads."""

    def __init__(self, order=0):
        self.kernels = Kernels(build.load(), order)

    def run(self, kernel, shapes, x, mu, rho, bias_mu, bias_rho, seed, T, grad=None):
        """Results of these shapes; None, and nothing to write to, for a shape of None."""
        (O, I), tensors = mu.shape, dict(x=x, mu=mu, rho=rho, bias=bias_mu, bias_rho=bias_rho)  # noqa: E741
        call = NOTHING | {k: array(v) for k, v in (tensors | dict(grad=grad, seed=seed)).items()}
        call |= dict(T=T, N=x.shape[1], O=O, I=I, shared=len(x) == 1, kernel=kernel)
        storage = np.float64 if mu.dtype == torch.float64 else np.float32
        results = [None if shape is None else fresh(tuple(shape), storage) for shape in shapes]
        call |= dict(zip(("out", "out2", "out3", "out4"), results, strict=False))
        written = [r for r in results if r is not None]
        self.kernels.call("bayes", written, **call, dtype=str(mu.dtype).removeprefix("torch."))
        return [None if r is None else torch.from_numpy(r) for r in results]

    def forward(self, x, mu, rho, bias_mu, bias_rho, seed, stream, T):
        xs = replicas(x, mu)
        given = (xs, mu, rho, bias_mu, bias_rho, seed, T)
        return self.run("direct_forward", [(T, xs.shape[1], len(mu))], *given)[0]

    def backward(self, grad_y, x, mu, rho, bias_rho, seed, stream, T):
        xs = replicas(x, mu)
        given = (xs, mu, rho, None, bias_rho, seed, T, grad_y)
        sums = (min(T, 16) if len(xs) == 1 else T, *xs.shape[1:])
        grad_x = self.run("direct_grad_x", [sums], *given)[0] if mu.numel() else torch.zeros(sums)
        shapes = [mu.shape, mu.shape, *[None if bias_rho is None else bias_rho.shape] * 2]
        grads = self.run("direct_grad_weight", shapes, *given)
        return (grad_x.sum(0) if x.dim() == 2 else grad_x).to(x.dtype), *grads

    def noise64(self, seed, T, O, I):  # noqa: E741
        """The noise of weights and biases to the last bit,
        which the CPU's own op rounds otherwise."""
        key, made = array(seed), []
        for tag, shape in ((0, (T, O, I)), (1, (T, O))):
            some = np.prod(shape) > 0
            z = self.kernels.philox_normal(key, STREAM, shape, tag) if some else np.zeros(shape)
            made.append(torch.from_numpy(z).double())
        return made


class Ops:
    """bayes_linear the fused way, and its parts."""

    def __init__(self, order):
        self.kernels = Kernels(build.load(), order)

    def forward(self, x, mu, rho, bias_mu, bias_rho, seed, stream, T):
        xs = replicas(x, mu)
        made = self.bayes_operands(None, xs, rho, x.dtype == torch.bfloat16)
        _, _, operand, scale, sigma, sigma_scale = made
        given = (operand, sigma, xs @ mu.t(), bias_mu, bias_rho, scale, sigma_scale)
        return self.bayes_forward(*given, seed, stream, T).to(x.dtype)

    def backward(self, grad_y, x, mu, rho, seed, stream, T):
        """By x, mu and rho."""
        xs, grad_y = replicas(x, mu), grad_y.to(mu.dtype)
        made = self.bayes_operands(grad_y, xs, rho, x.dtype == torch.bfloat16)
        operand, scale, x_operand, x_scale, sigma, sigma_scale = made
        summed = grad_y if len(xs) == T else grad_y.sum(0, keepdim=True)
        grad_mu = summed.flatten(0, 1).t() @ xs.flatten(0, 1)
        grad_rho = self.bayes_grad_rho(operand, x_operand, rho, scale, x_scale, seed, stream)
        grad_x = summed @ mu
        self.bayes_grad_x_(grad_x, operand, sigma, scale, sigma_scale, seed, stream)
        return (grad_x[0] if x.dim() == 2 else grad_x).to(x.dtype), grad_mu, grad_rho

    def run(self, kernel, dtype, result, **arguments):
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) or v is None}
        arguments |= {k: array(v) for k, v in tensors.items()}
        name = str(dtype).removeprefix("torch.")
        call = NOTHING | arguments | dict(kernel=kernel, dtype=name, out=result)
        self.kernels.call("bayes", [result], **call)
        return torch.from_numpy(result)

    def bayes_operands(self, grad_y, x, rho, bfloat16):
        """(what is made of each, its scale), of what is not None."""

        def size(v, dim):
            return 0 if v is None else v.shape[dim]

        O, I = size(grad_y, 2) or size(rho, 0), size(x, 2) or size(rho, 1)  # noqa: E741
        T, N = size(grad_y, 0) or size(x, 0), size(grad_y, 1) or size(x, 1)
        first, O16, I16 = size(x, 0), -(-O // 16) * 16, -(-I // 16) * 16
        tensors = {"grad": grad_y, "x": x, "rho": rho}
        shapes = zip(tensors.values(), [(T, N, O16), (first, N, I16), (O16 * I16,)], strict=True)
        results = [fresh((0,) if v is None else shape, np.uint16) for v, shape in shapes]
        results += [fresh((3,), np.float32), fresh((3, 512), np.float32)]
        names = ("out", "out2", "out3", "out4", "partial")
        call = NOTHING | {name: array(v) for name, v in tensors.items()}
        call |= dict(zip(names, results, strict=True))
        call |= dict(kernel="operands", T=T, N=N, O=O, I=I, shared=first == 1)
        dtype = torch.bfloat16 if bfloat16 else torch.float16
        self.kernels.call("bayes", results, **call, dtype=str(dtype).removeprefix("torch."))
        packed = [torch.from_numpy(r).view(dtype) for r in results[:3]]
        return [v for pair in zip(packed, torch.from_numpy(results[3]), strict=True) for v in pair]

    def bayes_forward(
        self, x, sigma, base, bias_mu, bias_rho, x_scale, sigma_scale, seed, stream, num_samples
    ):
        N, O = base.shape[1:]  # noqa: E741
        return self.run(
            "forward", x.dtype, fresh((num_samples, N, O), np.float32), x=x, sigma=sigma, base=base,
            bias=bias_mu, bias_rho=bias_rho, x_scale=x_scale, sigma_scale=sigma_scale, seed=seed,
            stream=stream, T=num_samples, N=N, O=O, I=x.shape[2], shared=len(x) == 1,
        )  # fmt: skip

    def bayes_grad_x_(self, grad_x, grad_y, sigma, grad_scale, sigma_scale, seed, stream):
        out = fresh(tuple(grad_x.shape), np.float32)
        out[...] = grad_x.numpy()
        T, N, O = grad_y.shape  # noqa: E741
        result = self.run(
            "grad_x", grad_y.dtype, out, grad=grad_y, sigma=sigma, grad_scale=grad_scale,
            sigma_scale=sigma_scale, seed=seed, stream=stream, T=T, N=N, O=O, I=grad_x.shape[2],
            shared=len(grad_x) == 1,
        )  # fmt: skip
        grad_x.copy_(result)

    def bayes_grad_rho(self, grad_y, x, rho, grad_scale, x_scale, seed, stream):
        (T, N), (O, I) = grad_y.shape[:2], rho.shape  # noqa: E741
        return self.run(
            "grad_rho", grad_y.dtype, fresh((O, I), np.float32), grad=grad_y, x=x,
            rho=rho, grad_scale=grad_scale, x_scale=x_scale, seed=seed, stream=stream, T=T, N=N, O=O,
            I=I, shared=len(x) == 1,
        )  # fmt: skip
