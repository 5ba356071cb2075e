"""Warnings name the line of the user, through context managers, hooks and torch's own frames."""

import warnings

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq

OPTIONS = {"num_samples": 4, "seed": 0, "sampler": "joint", "batch_size": 257}
CATEGORICAL = {"likelihood": "categorical", **OPTIONS}


class Half(nn.Module):
    """Half of its batch norm is a function."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        mean, var = torch.zeros(4), torch.ones(4)
        return self.drop(nn.functional.batch_norm(self.norm(x), mean, var))


def in_replicas(model, x):
    with bnuq.replicas(model, **OPTIONS):
        model(x)


CALLS = {
    "predict": lambda model, x: bnuq.predict(model, x, **CATEGORICAL),
    "mc_dropout": lambda model, x: bnuq.mc_dropout(model, x, **CATEGORICAL),
    "ensemble": lambda model, x: bnuq.ensemble([model], x, **CATEGORICAL),
    "replicas": in_replicas,
}


@pytest.mark.parametrize("op", CALLS)
def test_warnings_are_at_the_users_line(op):
    torch.manual_seed(0)
    model = bnuq.convert(Half()).eval()
    bank = bnuq.Bank({"norm": torch.rand(8, 4)}, {"norm": torch.rand(8, 4)}, 16, batch_size=16, dataset_size=400)  # fmt: skip
    bnuq.attach(model, bank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[op](model, torch.randn(3, 4))
    ours = [w for w in caught if str(w.message).startswith(f"{op}: ")]
    found = {"257 is outside" in str(w.message): w.filename for w in ours}
    assert found == {True: __file__, False: __file__}
