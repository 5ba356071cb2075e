"""`collect`: the numbers, the sources of batches, the warnings, and what it leaves as found."""

import torch
from torch import nn

import bnuq_ext as bnuq


class Net(nn.Module):
    """Convolution, BN, dropout, a second BN behind it, a dense BN: what a deeper layer sees matters."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.5)
        self.dense, self.bn3 = nn.Linear(3 * 5 * 5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(self.dropout(x))))
        return self.bn3(self.dense(x.flatten(1)))


def images(rows=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 5, 5, generator=generator) * 2 + 1


def batches(num=5, rows=8):
    return list(images(num * rows).split(rows))


def test_equals_batch_norm_in_train_mode():
    torch.manual_seed(1)
    net = Net()
    model = bnuq.convert(net)
    bank = bnuq.collect(model, batches(), 5)
    net.train()
    net.dropout.eval()
    for layer in (net.bn1, net.bn2, net.bn3):
        layer.momentum = 1.0
    for b, x in enumerate(batches()):
        net(x)
        for name in ("bn1", "bn2", "bn3"):
            layer, n = getattr(net, name), bank.count[name][b].item()
            torch.testing.assert_close(bank.mean[name][b], layer.running_mean)
            torch.testing.assert_close(bank.var[name][b], layer.running_var * ((n - 1) / n))
    assert bank.count["bn1"].tolist() == [8 * 25] * 5 and bank.count["bn3"].tolist() == [8] * 5
    assert bank.names == ("bn1", "bn2", "bn3")
