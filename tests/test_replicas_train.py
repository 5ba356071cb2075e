"""Bodies of `replicas` with the training flags as they are, and of one replica."""

import pytest
import torch
from coupled import ROWS, D, N, Norms
from folded import prepared
from test_folding import Plain
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.proof.training import TrainingFolding


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


class CentresWhere(Norms):
    """A part that is in train()."""

    def __init__(self):
        super().__init__()
        self.part, self.other = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h - h.mean(0) if self.part.training else h))


@torch.no_grad()
def test_each_choice_of_flags_is_held_to_train():
    model = prepared(CentresWhere, ROWS).eval()
    model.other.train()
    with bnuq.replicas(model, 2, seed=0):
        model(ROWS[:N])
    model.part.train()
    with pytest.raises(ValueError, match="replicas: model must"), bnuq.replicas(model, 2, seed=0):
        model(ROWS[:N])


class Several(Norms):
    """Outputs of which some have one number a row."""

    def forward(self, x):
        y = self.head(self.second(self.first(x)))
        return y, y[:, 0]


def test_outputs_of_one_number_a_row():
    model = prepared(Several, ROWS)
    with bnuq.replicas(model, 3, seed=0):
        y, first = model(ROWS[:N])
    assert y.shape[0] == 3 * N and torch.equal(first, y[:, 0])


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


@pytest.mark.parametrize("training", [False, True])
def test_chains_need_no_trial(monkeypatch, training):
    """In bfloat16 rounding is as large as what tells replicas apart."""
    torch.manual_seed(0)
    layers = [nn.Dropout(0.5), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    model = bnuq.convert(nn.Sequential(*layers, nn.Linear(64, 2))).bfloat16()
    x = torch.randn(40, 3, 6, 6).bfloat16()
    bnuq.collect(model, list(x.split(8)), progress=False)
    monkeypatch.setattr(TrainingFolding, "prove_in_train", None)
    model.train(training)
    with bnuq.replicas(model, 3, seed=0):
        rows = model(x[:4]).view(3, 4, 2)
    alone = []
    for t in range(3):
        with bnuq.replicas(model.eval(), 1, seed=0, first_replica=t):
            alone.append(model(x[:4]))
    close = torch.isclose(rows, torch.stack(alone), rtol=0.02, atol=0.02)
    assert close.all() if not training else close.float().mean() < 0.5


def test_dropout_in_front_of_a_chain_has_masks_for_each_replica():
    model = bnuq.convert(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(50), nn.Identity()))
    bnuq.collect(model, [torch.randn(8, 50)], progress=False)
    with bnuq.replicas(model.train(), 3, seed=0):
        rows = model(torch.ones(4, 50)).view(3, 4, 50)
    # Without them two replicas are equal, for there is one snapshot.
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


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


class CentresAtTimes(Norms):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.tensor(False))

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - h.mean(0) if self.centre else h)


def test_a_model_that_was_refused_is_tried_again_with_other_values():
    model = in_training(CentresAtTimes)
    for centre in (False, True, True, False):
        model.centre.fill_(centre)
        with bnuq.replicas(model, 3, seed=0):
            if centre:
                with pytest.raises(ValueError, match="must give the same folded"):
                    model(ROWS[:N])
            else:
                assert len(model(ROWS[:N])) == 3 * N
