"""Bodies of `replicas` with the training flags as they are, and of one replica."""

import pytest
import torch
from coupled import ROWS, D, N, Norms
from test_folding import Plain, prepared
from torch import nn

import bnuq_ext as bnuq


def in_training(cls):
    """Its batch norm keeps its running statistics."""
    model = prepared(cls, ROWS)
    bnuq.freeze(model)
    return model.train()


class CentresMany(Norms):
    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h - h.mean(0) if self.training and len(h) > 2 * N else h))


def test_each_number_of_replicas_is_held_to_train():
    model = in_training(CentresMany)
    with bnuq.replicas(model, 2, seed=0):
        model(ROWS[:N])
    with pytest.raises(ValueError, match="replicas: model must"), bnuq.replicas(model, 3, seed=0):
        model(ROWS[:N])


class DropConnect(Norms):
    """Writes into what dropout has made of a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        scale = nn.functional.dropout(self.scale, 0.5, self.training)
        if self.training:
            scale.mul_(2)
        return self.head(self.second(self.first(x) * scale))


def test_what_dropout_would_have_made_is_no_parameter():
    model = in_training(DropConnect)
    with bnuq.replicas(model, 3, seed=0):
        assert len(model(ROWS[:N])) == 3 * N
    assert (model.scale == 1).all()


def test_one_replica_is_refused_in_the_name_of_replicas():
    class Often(Plain):
        often = False

        def forward(self, x):
            return self.first(self.first(x)) if self.often else super().forward(x)

    model = prepared(Often, ROWS)
    model.often = True
    with pytest.raises(ValueError, match="replicas: layer"), bnuq.replicas(model, 1, seed=0):
        model(ROWS[:4])


def test_a_hook_may_hook_the_gradients_of_an_activation():
    """As attributions do (Grad-CAM)."""
    model, seen = prepared(Plain, ROWS), []

    def hook(module, args, output):
        output.register_hook(lambda gradient: seen.append(gradient.shape))

    model.norm_b.register_forward_hook(hook)
    with bnuq.replicas(model, 3, seed=0):
        model(ROWS[:N]).sum().backward()
    assert seen[-1] == (3 * N, D)


def test_rows_that_are_alike_at_the_front():
    """As on a path of integrated gradients from a baseline."""
    model = prepared(Plain, ROWS)
    path = torch.linspace(0, 1, 250).pow(4).unsqueeze(1) * ROWS[:1]
    with bnuq.replicas(model, 3, seed=0):
        expected = model(path.flip(0)).unflatten(0, (3, -1)).flip(1)
    model = prepared(Plain, ROWS)
    with bnuq.replicas(model, 3, seed=0):
        torch.testing.assert_close(model(path).unflatten(0, (3, -1)), expected)
