"""`freeze`: batch norm that stays as it is while the rest of a model trains."""

from torch import nn

from .bank import stochastic_layers


def freeze(model: nn.Module, *, statistics: bool = True, affine: bool = True) -> None:
    """Sets two switches of all stochastic batch-norm layers, of which train() and eval() turn neither.

    A layer without gradients is not yet frozen: in train() it normalises with its batch and moves its
    running statistics, under no_grad too. What `predict`, `replicas` and `collect` normalise with is a
    switch of its own, and theirs. For fine-tuning with other or smaller batches, freeze both.

    Args:
        model: converted by `convert`.
        statistics: True: the running statistics normalise in train() too, and do not move. False: train()
            is ordinary again, from its next call on.
        affine: True: weight and bias of the layers get no gradient. False: they do.

    Raises:
        ValueError, TypeError: no model, or one without stochastic layers.
    """
    for layer in stochastic_layers("freeze", model).values():
        layer.frozen = bool(statistics)
        layer.training = layer.training and not layer.frozen
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(not affine)
