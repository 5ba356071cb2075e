"""The networks of unseen classes, and how they are trained."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bnuq_ext.experiments.fitting import shifted, train_epoch
from bnuq_ext.protocols import ood, ood_networks


def test_training_learns_and_ends_with_a_rate_of_zero(monkeypatch):
    images = ood.read_images("digits", replace(ood.QUICK, num_train=400), None)
    rates = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)),
    )
    torch.manual_seed(0)
    network = ood_networks.LeNet5(1, 8, 5, 0.0)
    options = {"epochs": 3, "batch_size": 16, "learning_rate": 1e-3, "augment": False}
    ood_networks.train(network, *images.train, **options)
    expected = 1e-3 * (1 - torch.arange(75) / 75)
    torch.testing.assert_close(torch.tensor(rates), expected, rtol=1e-4, atol=1e-9)
    with torch.no_grad():
        assert (network(images.known.x).argmax(1) == images.known.y).float().mean() > 0.9


@pytest.mark.parametrize(
    "name, size", [("lenet-5", 28), ("lenet-5", 8), ("vgg-11", 32), ("resnet-18", 32)]
)
def test_networks(name, size):
    network = ood_networks.NETWORKS[name](3, size, 5, 0.5)
    assert network(torch.randn(2, 3, size, size)).shape == (2, 5)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in network.modules())
    assert norms == {"lenet-5": 2, "vgg-11": 8, "resnet-18": 20}[name]
    assert sum(isinstance(m, nn.Dropout) for m in network.modules()) == 1


def test_an_epoch_takes_whole_batches_in_a_new_order():
    network, seen = nn.Linear(1, 1), []
    network.register_forward_hook(lambda module, args, out: seen.append(args[0].flatten().tolist()))
    x = torch.arange(10.0)[:, None]
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    for _ in range(2):
        train_epoch(network, optimizer, nn.functional.mse_loss, x, x, 4)
    assert [len({*rows}) for rows in seen] == [4] * 4 and len({*seen[0], *seen[1]}) == 8
    assert seen[0] + seen[1] != seen[2] + seen[3]


@pytest.mark.parametrize("size, kernel", [(16, 5), (15, 3)])
def test_kernels_of_lenet_are_smaller_for_images_below_16_pixels(size, kernel):
    network = ood_networks.LeNet5(1, size, 5, 0.5)
    found = {m.kernel_size for m in network if isinstance(m, nn.Conv2d)}
    assert found == {(kernel, kernel)} and network(torch.randn(2, 1, size, size)).shape == (2, 5)


def test_shifts_and_flips():
    x = torch.arange(2 * 36.0).view(1, 2, 6, 6) + 1
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    crops = [padded[0, :, i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
    plain = {crop.contiguous().numpy().tobytes() for crop in crops}
    turned = {crop.flip(2).contiguous().numpy().tobytes() for crop in crops}
    torch.manual_seed(0)
    made = shifted(x.expand(500, 2, 6, 6), 4)
    seen = [image.numpy().tobytes() for image in made]
    assert {*seen} <= plain | turned and len({*seen}) > 100
    # Half of 500 are turned: five standard errors.
    assert abs(sum(image in turned for image in seen) - 250) < 5 * 125**0.5


def test_a_block_adds_what_came_in():
    x = torch.randn(2, 4, 6, 6)
    for width, stride in ((4, 1), (8, 2)):
        block = ood_networks.Block(4, width, stride).eval()
        nn.init.zeros_(block.norm2.weight)
        torch.testing.assert_close(block(x), block.past(x).relu())
    network = ood_networks.ResNet18(3, 32, 5, 0.0)
    assert nn.Sequential(*[*network][:-4])(torch.randn(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    assert [type(m).__name__ for m in [*ood_networks.VGG11(3, 32, 5, 0.0)][:4]] == [
        "Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d",
    ]  # fmt: skip


def test_images_are_shifted_by_every_number_of_pixels():
    x = torch.zeros(200, 1, 5, 5)
    x[:, :, 2, 2] = 1
    torch.manual_seed(0)
    rows, columns = shifted(x, 1).squeeze(1).nonzero()[:, 1:].T.tolist()
    assert {*rows} == {*columns} == {1, 2, 3} and len(rows) == 200
