"""`freeze`: batch norm that stays as it is while the rest of a model trains."""

from torch import nn

from .nn import require_stochastic_layers
from .ops.checks import check_flags


def freeze(model: nn.Module, *, statistics: bool = True, affine: bool = True) -> None:
    """Freezes the stochastic batch-norm layers of a model, or lets them go; train() and eval()
    leave that as it is.

    `requires_grad_(False)` does not freeze batch norm: in train() a layer still normalises with its
    batch and moves its running statistics, under no_grad too. To fine-tune with other or smaller
    batches, freeze both. What `predict`, `replicas` and `collect` do is the same, frozen or not.

    Args:
        model: converted by `convert`.
        statistics: True: in train() too a layer normalises with its running statistics, which do
            not move, nor are they reset (`torch.optim.swa_utils.update_bn`).
            False: as in torch again, from the next call of train() on.
        affine: True: weight and bias of the layers get no gradient. False: they do.

    Raises:
        ValueError, TypeError: an argument is refused; a model without stochastic layers.
    """
    layers = require_stochastic_layers("freeze", model)
    check_flags("freeze", statistics=statistics, affine=affine)
    for layer in layers.values():
        layer.frozen = statistics
        layer.training = layer.training and not layer.frozen
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(not affine)
