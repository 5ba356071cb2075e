"""A converted network with a bank, and predictions of it to compare."""

import torch
from torch import nn

import bnuq_ext as bnuq

OPTIONS = {"likelihood": "categorical", "num_samples": 20, "seed": 3}
SAMPLERS = ["bank", "joint", "lognormal", "normal"]
DATA = torch.randn(400, 2, 6, 6, generator=torch.Generator().manual_seed(0))
X = DATA[:9]


def network(dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 2 * 2, 5),
    )  # fmt: skip


def make_model():
    """The network, converted, with 24 snapshots of batches of sixteen."""
    torch.manual_seed(0)
    made = bnuq.convert(network(dropout=0.2)).eval()
    dataset = torch.utils.data.TensorDataset(DATA)
    bnuq.collect(made, dataset, 24, batch_size=16, progress=False)
    return made


def predict(model, x=X, **options):
    return bnuq.predict(model, x, **{**OPTIONS, **options})


def equal(a, b):
    """Whether two predictions agree to rounding."""
    for name in ("mean", "variance", "entropy", "mutual_information", "samples"):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Flexible(nn.Module):
    """Two inputs, and an output that is a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, scale=None, *, flip=False):
        h = self.norm(self.linear(x)).relu()
        h = h if scale is None else h * scale
        return {"logits": self.head(-h if flip else h), "features": h}


def make_flexible():
    """The same of it, converted, with a bank."""
    torch.manual_seed(0)
    made = bnuq.convert(Flexible()).eval()
    bnuq.collect(made, list(torch.randn(10, 16, 4)), 10, progress=False)
    return made
