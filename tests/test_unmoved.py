"""An error, of an argument or of the model, leaves torch's generator as it was."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
CATEGORICAL = {"likelihood": "categorical"}


class Drawing(nn.Module):
    """Draws, and fails."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        raise OSError(f"its own, after {torch.rand(3)}")


@pytest.fixture
def model():
    layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    model = bnuq.convert(layers)
    bnuq.collect(model, [X[:20], X[20:]], progress=False)
    return model


def fit(data, validation=None):
    options = {**CATEGORICAL, "validation": validation, "progress": False}
    return lambda model: bnuq.fit_batch_size(model, data, [4], **options)


REFUSED = {
    "validation without targets": (fit((X, Y), X), ValueError, "validation must be"),
    "labels": (fit((X, Y + 5)), ValueError, "y must lie in"),
    "widths": (fit((X, Y), (X[:, :3], Y)), RuntimeError, "shapes cannot be multiplied"),
    "normality": (
        lambda model: bnuq.statistics_normality(model, X[:, :3], 4, progress=False),
        RuntimeError,
        "shapes cannot be multiplied",
    ),
}
OPS = {
    "plug_in": lambda net: bnuq.plug_in(net, X, **CATEGORICAL),
    "mc_dropout": lambda net: bnuq.mc_dropout(net, X, **CATEGORICAL),
    "ensemble": lambda net: bnuq.ensemble([net, net], X, **CATEGORICAL),
    "predict": lambda net: bnuq.predict(net, X, **CATEGORICAL),
    "collect": lambda net: bnuq.collect(net, [X], progress=False),
    "doctor": lambda net: bnuq.doctor(net, X),
}


@pytest.mark.parametrize("case", REFUSED)
def test_after_a_refusal(model, case):
    call, error, text = REFUSED[case]
    before = torch.get_rng_state()
    with pytest.raises(error, match=text):
        call(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("op", OPS)
def test_after_an_error_of_the_model(op):
    net = bnuq.convert(Drawing().eval())
    statistics = {"norm": torch.ones(2, 4)}
    bnuq.attach(net, bnuq.Bank(statistics, statistics, 8, batch_size=8))
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="its own"):
        OPS[op](net)
    assert torch.equal(torch.get_rng_state(), before)
