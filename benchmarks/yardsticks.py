"""What T replicas cost without this package: each yardstick gives the (T, N, K)
outputs of a plain model.

Every function takes
    model:   a network of torch's own batch norms, in eval mode; it is copied.
    tables:  {name of a batch norm: (mean (T, C), biased var (T, C))}, row t for replica t.
    x:       (N, *) the input of every replica.
and does all the work that does not depend on x before it returns the function that is timed.
"""

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

Tables = dict[str, tuple[Tensor, Tensor]]
Run = Callable[[], Tensor]


class Unavailable(Exception):
    """This yardstick cannot run here; the text says why."""


def need_triton() -> None:
    if find_spec("triton") is None:
        raise Unavailable("Triton is not installed")


def why(error: Exception) -> str:
    """What a report says of a yardstick that did not run:
    its failure must not cost the others their numbers."""
    return (
        str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"[:200]
    )


def num_replicas(tables: Tables) -> int:
    return len(next(iter(tables.values()))[0])


def running_statistics(tables: Tables) -> dict[str, Tensor]:
    """The tables as buffers of the model, stacked over T."""
    means = {f"{name}.running_mean": mean for name, (mean, _) in tables.items()}
    return means | {f"{name}.running_var": var for name, (_, var) in tables.items()}


def random_tables(model: nn.Module, num_samples: int) -> Tables:
    """Statistics scattered around the running ones by a tenth of the spread."""
    generator = torch.Generator().manual_seed(0)
    tables = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            z = 0.1 * torch.randn(2, num_samples, layer.num_features, generator=generator)
            mean, var = layer.running_mean.cpu(), layer.running_var.cpu()
            pair = (mean + z[0] * var.sqrt(), var * z[1].exp())
            tables[name] = tuple(t.to(layer.running_mean) for t in pair)
    return tables


def loop(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """T eval passes; between them the running statistics are exchanged by reference,
    without a copy."""
    model = deepcopy(model)
    layers = [
        (model.get_submodule(n)._buffers, m.unbind(), v.unbind()) for n, (m, v) in tables.items()
    ]

    def run():
        outputs = []
        for t in range(num_replicas(tables)):
            for buffers, means, variances in layers:
                buffers["running_mean"], buffers["running_var"] = means[t], variances[t]
            outputs.append(model(x))
        return torch.stack(outputs)

    return run


def vmapped(model: nn.Module, tables: Tables, x: Tensor, chunk: int | None = None) -> Run:
    """`torch.func.vmap` over the stacked statistics, `chunk` replicas at a time."""
    buffers = running_statistics(tables)
    batched = vmap(lambda row: functional_call(model, row, (x,)), chunk_size=chunk)
    return lambda: batched(buffers)


def compiled_loop(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """T passes of the compiled model, the statistics being arguments."""
    step = torch.compile(lambda row, x: functional_call(model, row, (x,)))
    buffers = running_statistics(tables)
    rows = [{k: v[t] for k, v in buffers.items()} for t in range(num_replicas(tables))]
    return compiled(lambda: torch.stack([step(row, x) for row in rows]))


def compiled(run: Run) -> Run:
    """The same after its first call, in which the compiler runs."""
    try:
        run()
    except RuntimeError as error:  # no compiler at hand, or one that fails on this model
        raise Unavailable(f"does not compile: {str(error).strip().splitlines()[0]}") from error
    return run


# ---- statistics folded into the layer before ----------------------------------------------------


def without_batch_norm(model: nn.Module) -> tuple[fx.GraphModule, list[tuple[str, str]]]:
    """The model's graph with its batch norms taken out, and the pairs
    (layer before, batch norm)."""
    graph_module = fx.symbolic_trace(deepcopy(model))
    modules, pairs = dict(graph_module.named_modules()), []
    for node in list(graph_module.graph.nodes):
        layer = modules.get(node.target) if node.op == "call_module" else None
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        before = node.args[0]
        producer = modules.get(before.target) if before.op == "call_module" else None
        if not isinstance(producer, nn.Linear | nn.modules.conv._ConvNd) or len(before.users) > 1:
            raise Unavailable(f"{node.target} does not follow a convolution or a linear layer")
        pairs.append((before.target, node.target))
        node.replace_all_uses_with(before)
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module, pairs


def folded_weights(layer, norm, means: Tensor, variances: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of `layer` with row t of the statistics and the affine of `norm` folded in."""
    fuse = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    return [
        fuse(layer.weight, layer.bias, mean, var, norm.eps, norm.weight, norm.bias)
        for mean, var in zip(means, variances, strict=True)
    ]


def folded_into_convolutions(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """T passes of a network without batch norm, T sets of weights being held in memory."""
    bare, pairs = without_batch_norm(model)
    layers = []
    for before, name in pairs:
        layer = bare.get_submodule(before)
        folded = folded_weights(layer, model.get_submodule(name), *tables[name])
        layers.append((layer._parameters, folded))

    def run():
        outputs = []
        for t in range(num_replicas(tables)):
            for parameters, folded in layers:
                parameters["weight"], parameters["bias"] = folded[t]
            outputs.append(bare(x))
        return torch.stack(outputs)

    return run


# ---- all replicas as rows ------------------------------------------------------------------------


def scale_and_shift(mean, var, weight, bias, eps) -> tuple[Tensor, Tensor]:
    """Batch norm as x * scale[t] + shift[t], for statistics (T, C)."""
    scale = weight * (var + eps).rsqrt()
    return scale, bias - mean * scale


class BatchedAffine(nn.Module):
    """(x - mean[t]) / sqrt(var[t] + eps) * weight + bias of folded rows as one `addcmul`.

    Shapes: (N, C, *) with N = `rows`, shared by all replicas, or (T*N, C, *) -> (T*N, C, *).
    """

    def __init__(self, norm: nn.Module, mean: Tensor, var: Tensor, rows: int):
        super().__init__()
        self.rows = rows
        weight, bias = norm.weight.detach(), norm.bias.detach()
        self.scale, self.shift = scale_and_shift(mean, var, weight, bias, norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        num_samples, channels = self.scale.shape
        per_channel = (num_samples, 1, channels) + (1,) * (x.dim() - 2)
        shared = x.shape[0] == self.rows and num_samples > 1
        replicas = x.unsqueeze(0) if shared else x.unflatten(0, (num_samples, self.rows))
        shift, scale = self.shift.to(x.dtype), self.scale.to(x.dtype)
        y = torch.addcmul(shift.view(per_channel), replicas, scale.view(per_channel))
        return y.flatten(0, 1)


def as_rows(model: nn.Module, tables: Tables, rows: int, affine=BatchedAffine) -> nn.Module:
    """A copy of the model in which `affine(norm, mean, var, rows)` stands for every batch norm."""
    model = deepcopy(model)
    for name, (mean, var) in tables.items():
        parent, _, child = name.rpartition(".")
        norm = model.get_submodule(name)
        setattr(model.get_submodule(parent), child, affine(norm, mean, var, rows))
    return model


def batched(model: nn.Module, tables: Tables, x: Tensor, affine=BatchedAffine) -> Run:
    """One pass over T*N rows, the part before the first batch norm over N;
    for models that never mix rows."""
    model = as_rows(model, tables, len(x), affine)
    return lambda: model(x).unflatten(0, (num_replicas(tables), len(x)))


def compiled_batched(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """`batched` under Inductor."""
    model = torch.compile(as_rows(model, tables, len(x)))
    return compiled(lambda: model(x).unflatten(0, (num_replicas(tables), len(x))))


def triton_batched(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """`batched` with the Triton affine."""
    need_triton()
    from .triton_affine import TritonAffine

    return batched(model, tables, x, TritonAffine)


# ---- another package -----------------------------------------------------------------------------


def torch_uncertainty(model: nn.Module, tables: Tables, x: Tensor) -> Run:
    """MCBatchNorm of torch-uncertainty, with our statistics in place of those
    that its `fit` collects."""
    if find_spec("torch_uncertainty") is None:
        raise Unavailable("not installed")
    try:
        from torch_uncertainty.post_processing import MCBatchNorm
    except Exception as error:  # an installed package can be broken in any way
        raise Unavailable(f"does not load: {type(error).__name__}: {error}") from error
    if any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm3d) for m in model.modules()):
        raise Unavailable("converts BatchNorm2d only")
    MCBatchNorm.mc_batch_norm_layers = []  # the class shares this list between its objects
    wrapper = MCBatchNorm(model, num_estimators=num_replicas(tables)).eval()
    for name, (mean, var) in tables.items():
        layer = wrapper.model.get_submodule(name)
        layer.means.copy_(mean)
        layer.vars.copy_(var)
    wrapper.set_accumulate(False)
    wrapper.trained = True
    return lambda: wrapper(x).unflatten(0, (num_replicas(tables), len(x)))


# ---- what is made of the outputs -----------------------------------------------------------------


def predictive(run: Run) -> Callable[[], tuple[Tensor, ...]]:
    """Mean, variance, entropy and mutual information of the outputs of `run` as logits,
    in plain PyTorch."""

    def summarise():
        log_p = run().float().log_softmax(-1)
        p = log_p.exp()
        mean = p.mean(0)
        entropy = -(mean * mean.log()).sum(-1)
        expected_entropy = -(p * log_p).sum(-1).mean(0)
        return mean, p.var(0, correction=0), entropy, entropy - expected_entropy

    return summarise
