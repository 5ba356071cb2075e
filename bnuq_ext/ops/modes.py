"""What the ops ask of torch's modes: tracing, autograd, autocast."""

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def is_eager() -> bool:
    """Whether ops run as they are called: neither compiled nor under a transform of torch.func."""
    transformed = torch._C._are_functorch_transforms_active()
    return not (transformed or torch.compiler.is_compiling())


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's values and address can be asked for."""
    return is_eager() and not isinstance(tensor, FakeTensor)


def is_within_transform() -> bool:
    """Whether a transform of torch.func or a dispatch mode of the caller's makes of tensors what is
    not for later."""
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 or torch._C._are_functorch_transforms_active()


def other_modes() -> tuple[tuple, ...]:
    """Kinds and flags of the modes around that may make something else of torch's functions and
    operations: a default device, and others of torch itself, do not."""
    functions = torch._C._len_torch_function_stack()
    operations = torch._C._len_torch_dispatch_stack()
    if not functions and not operations:
        return ()
    around = (
        *map(torch._C._get_function_stack_at, range(functions)),
        *map(torch._C._get_dispatch_stack_at, range(operations)),
    )
    homes = "torch", __package__.partition(".")[0]
    others = [m for m in around if type(m).__module__.partition(".")[0] not in homes]
    # Numbers may be counts.
    flags = [[pair for pair in vars(m).items() if type(pair[1]) in (bool, str)] for m in others]
    return tuple((type(m), *sorted(named)) for m, named in zip(others, flags, strict=True))


def is_differentiated(*grads: Tensor | None) -> bool:
    """Whether what a backward makes of gradients is differentiated itself: again, or along a tangent
    that one of them has."""
    return torch.is_grad_enabled() or lacks_rule(*grads)


def are_batched(*grads: Tensor | None) -> bool:
    """Whether one stands for those of a vmap, as gradients do with `is_grads_batched`: it runs no
    op that takes or returns lists of them."""
    if torch.compiler.is_compiling():
        return False
    of_vmap = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
    return any(check(grad) for grad in grads if grad is not None for check in of_vmap)


def is_recorded() -> bool:
    """Whether torch.export or torch.jit.trace records what is computed, for inputs with other values
    and sizes."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being made of what is computed: it waits for no value, and what it
    makes is there only once it is replayed."""
    initialised = device.type == "cuda" and torch.cuda.is_initialized()
    return initialised and torch.cuda.is_current_stream_capturing()


def mark_written(*tensors: Tensor) -> None:
    """Tells autograd that an op has written into tensors: a backward that kept one then says so,
    as torch's do."""
    if is_eager():
        torch.autograd.graph.increment_version(tensors)


def past_autograd():
    """Around an op: its kernel directly where no graph is made, past 8 us of its rule,
    which is Python."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def autocasted(x: Tensor) -> Tensor:
    """What autocast would make of an input of a linear layer."""
    if not _autocasts(x.device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """What autocast rounds to on each kind of device; empty where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


def past_autocast(device: torch.device):
    """Around float32 products that autocast would round to 16 bits; it reaches into an op too."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext()


@contextmanager
def without_autocast():
    """`past_autocast` on all devices."""
    with past_autocast(torch.device("cpu")), past_autocast(torch.device("cuda")):
        yield


def _autocasts(device: torch.device) -> bool:
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = device.type
    # Older dynamo breaks the graph where it is asked of a kind.
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def lacks_rule(*args) -> bool:
    """Whether derivatives are taken for which a registered op has no rule: inside torch.func.grad and
    the like, or of a tensor with a tangent, for which it would return one of 0."""
    return _has_tangent(*args) or (torch.is_grad_enabled() and _differentiates_functions())


def _has_tangent(*values) -> bool:
    """Whether one has a tangent, or may have one of a transform around the innermost."""
    if forward_ad._current_level < 0:
        return False
    transforms, jvp = _transforms(), torch._C._functorch.TransformType.Jvp
    others = transforms and (transforms[-1] != jvp or transforms.count(jvp) > 1)
    if others or torch.compiler.is_compiling():
        return True  # torch tells of the innermost alone
    tensors = (value for value in values if isinstance(value, Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def refuse_forward_derivatives(op: str, tensor: Tensor) -> None:
    """Raises for a tensor with a tangent."""
    if _has_tangent(tensor):
        message = "forward-mode derivatives are not available; take them within `replicas`"
        raise NotImplementedError(f"{op}: {message}")


def refuse_functional_derivatives(op: str) -> None:
    """Raises inside torch.func.grad, vjp and what is made of them, where gradients are on."""
    if torch.is_grad_enabled() and _differentiates_functions():
        message = "derivatives by torch.func are not available; take them within `replicas`"
        raise NotImplementedError(f"{op}: {message}")


def _differentiates_functions() -> bool:
    return torch._C._functorch.TransformType.Grad in _transforms()


def _transforms() -> list:
    """The transforms of torch.func that are active, the innermost last."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [level.key() for level in torch._C._functorch.get_interpreter_stack()]
