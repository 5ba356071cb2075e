"""Models whose rows meet, or whose replicas could: each must give the loop's answer
or be refused."""

import torch
import torch.nn.functional as F
from torch import nn

D, K, N = 8, 4, 6  # features, classes, rows


class Norms(nn.Module):
    """Two linear layers with batch norm, the parts of the models below."""

    def __init__(self):
        super().__init__()
        self.a, self.norm_a = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.b, self.norm_b = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.head = nn.Linear(D, K)

    def first(self, x):
        return self.norm_a(self.a(x)).relu()

    def second(self, x):
        return self.norm_b(self.b(x)).relu()


class BatchAttention(Norms):
    """Every row attends to all rows of the batch."""

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(F.softmax(h @ h.T, 1) @ h))


class FarAttention(Norms):
    """The same after everything stochastic."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(F.softmax(h @ h.T, 1) @ h)


class EarlyAttention(Norms):
    """Rows meet before anything stochastic, which the replicas share: may fold."""

    def forward(self, x):
        return self.head(self.second(self.first(F.softmax(x @ x.T, 1) @ x)))


class Graph(Norms):
    """A graph layer with an adjacency matrix of N nodes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", torch.rand(N, N).softmax(1))

    def forward(self, x):
        return self.head(self.second(self.adjacency @ self.first(x)))


class GraphInput(Norms):
    """The adjacency matrix comes with the input."""

    def forward(self, x, adjacency):
        return self.head(self.second(adjacency @ self.first(x)))


class TwoTowers(Norms):
    """Both towers see the shared input, and meet row by row: may fold."""

    def forward(self, x):
        return self.head(self.first(x) * self.second(x))


class Contrast(Norms):
    """Two towers, every row of one with every row of the other."""

    def forward(self, x):
        return self.first(x) @ self.second(x).T


class Bypass(Norms):
    """The input goes round the first stochastic layer: folds when expanded."""

    def forward(self, x):
        return self.head(x + self.second(x + self.first(x)))


class Video(Norms):
    """Clips of F frames; the frames are rows of the batch norm."""

    frames = 5

    def forward(self, x):
        n, f, d = x.shape
        h = self.first(x.reshape(n * f, d)).view(-1, f, d).mean(1)
        return self.head(self.second(h))


class RememberingVideo(Video):
    """The same, but the number of clips is taken from the input."""

    def forward(self, x):
        n, f, d = x.shape
        h = self.first(x.reshape(n * f, d)).view(n, -1, d).mean(1)
        return self.head(self.second(h))


class FramesFirst(Norms):
    """Frames come first: (F, N, D)."""

    def forward(self, x):
        f, n, d = x.shape
        h = self.first(x.reshape(f * n, d)).view(f, -1, d).mean(0)
        return self.head(self.second(h))


class BatchSoftmax(Norms):
    """The rows of the batch share out one."""

    def forward(self, x):
        return self.head(self.second(self.first(x).softmax(0)))


class RememberedRows(Norms):
    """view(N, -1) with the N of the input."""

    def forward(self, x):
        n = x.shape[0]
        h = self.second(self.first(x)).view(n, -1)
        return h[:, :D] @ self.head.weight.T


class RowsInAttribute(Norms):
    """The same with N kept on the module."""

    def forward(self, x):
        self.rows = x.shape[0]
        return self.head(self.second(self.first(x).view(self.rows, -1)[:, :D]))


class Squeeze(Norms):
    """squeeze() without a dimension: another shape where N is 1."""

    def forward(self, x):
        return self.head(self.second(self.first(x)).unsqueeze(1)).squeeze()


class MeanSubtraction(Norms):
    """In-batch contrast: minus the mean of the batch."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - h.mean(0))


class RecurrentRows(Norms):
    """An RNN whose time is the batch dimension: a row sees the ones before it."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(D, D)

    def forward(self, x):
        return self.head(self.rnn(self.second(self.first(x)).unsqueeze(1))[0].squeeze(1))


class MemoryBank(Norms):
    """Rows attend to the features of earlier calls, which every call replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.randn(10, D))

    def forward(self, x):
        h = self.second(self.first(x))
        out = self.head(h + F.softmax(h @ self.memory.T, 1) @ self.memory)
        self.memory = torch.cat([h.detach(), self.memory])[:10]
        return out


class QueueInPlace(Norms):
    """A memory that is written in place and kept in an attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        self.queue = torch.randn(10, D)

    def forward(self, x):
        h = self.second(self.first(x))
        out = self.head(h + self.queue.mean(0))
        self.queue[: h.shape[0]] = h[:10].detach()
        return out


class Neighbours(Norms):
    """Each row is mixed with the next: the last of a replica would meet the next replica's
    first."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h + h.roll(-1, 0))


def next_rows(h, by=1):
    """Each row's next one, by numbers: of an operation that goes along rows a trial would know."""
    return h[torch.arange(by, len(h) + by) % len(h)]


class FarNeighbours(Norms):
    """Rows six apart meet, which three rows do not show."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h + next_rows(h, 6))


class FirstRows(Norms):
    """Only the first four rows go on, which three rows do not show."""

    def forward(self, x):
        return self.head(self.second(self.first(x)[:4]))


class LargeBatches(Norms):
    """Batches of more than twelve rows are centred, which three rows do not show."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - h.mean(0) if len(h) > 12 else h)


class LastRow(Norms):
    """Everything is compared with the last row of the batch."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - h[-1:])


class Pairs(Norms):
    """Consecutive rows belong together, in an even batch: right at its own size only."""

    def forward(self, x):
        left, right = self.second(self.first(x)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(left - right)


class ConstantRows(Norms):
    """The output does not depend on the stochastic layers."""

    def forward(self, x):
        self.second(self.first(x))
        return self.head.bias.expand(x.shape[0], K) + 0


class OneRow(Norms):
    """The whole batch gives one row."""

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean(0, keepdim=True))


class Prototypes(Norms):
    """A second input of its own goes through a stochastic layer; its rows are not those of x."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(K, D))

    def forward(self, x):
        return self.first(x) @ self.second(self.prototypes).T


class Dropping(Norms):
    """Random in eval."""

    def forward(self, x):
        return self.head(F.dropout(self.second(self.first(x)), 0.5, training=True))


class Gated(Norms):
    """Coupled by a branch that is not taken until its gate is trained, or an option set."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))
        self.options = {"centred": False}

    def forward(self, x):
        h = self.second(self.first(x))
        centred = self.options["centred"] or self.gate > 0
        return self.head(h - h.mean(0) if centred else h)


class ZeroGate(Gated):
    """Coupled by a product that is 0 until its gate is trained."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - self.gate * h.mean(0))


class Clipped(Norms):
    """Scaled down as one where the batch is large, as gradients are; usual rows are small."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h * (40 / h.norm()).clamp(max=1))


class Threshold(Norms):
    """Centred by what the batch has above a threshold; usual rows are below."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - (h.mean(0) - 3).relu())


class Ahead(Norms):
    """Rows six apart meet, which three rows do not show; the last replica has none behind it."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h + F.pad(h, (0, 0, 0, 6))[6:])


class SortedRows(Norms):
    """The rows come out in another order."""

    def forward(self, x):
        out = self.head(self.second(self.first(x)))
        return out[out[:, 0].argsort()]


class ReplicasLast(Norms):
    """(N, D) is transposed twice: rows of the batch become columns in between."""

    def forward(self, x):
        return self.head(self.second(self.first(x)).T.cumsum(1).T)


ROWS = torch.randn(64, D, generator=torch.Generator().manual_seed(1))
CLIPS = torch.randn(64, 5, D, generator=torch.Generator().manual_seed(2))

COUPLED = [
    BatchAttention, FarAttention, EarlyAttention, Graph, TwoTowers, Contrast, Bypass, BatchSoftmax,
    RememberedRows, RowsInAttribute, Squeeze, MeanSubtraction, RecurrentRows, MemoryBank, QueueInPlace,
    Neighbours, FarNeighbours, FirstRows, LargeBatches, LastRow, Pairs, ConstantRows, OneRow, Prototypes,
    Gated, ZeroGate, Clipped, Threshold, Ahead, SortedRows, ReplicasLast,
]  # fmt: skip
VIDEO = [Video, RememberingVideo, FramesFirst]
FOLDS = {EarlyAttention: "folded", TwoTowers: "folded", Bypass: "expanded", Video: "folded"}
