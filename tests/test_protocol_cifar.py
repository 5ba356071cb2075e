"""CIFAR-10 on tiny data: the network, augmentation, the likelihood of T replicas,
the paper's table."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed import packed
from rates import record_sgd
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.protocols import cifar

pytestmark = pytest.mark.usefixtures("without_gpu")

TINY = cifar.Settings(
    num_units=1, steps=4, drops=(2,), train_batch_size=8, batch_size=8, num_test=5, num_runs=2
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "cifar10").mkdir()
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (106, 32, 32, 3), dtype=np.uint8)
    (root / "cifar10" / "train_00000_00099.npy.xz").write_bytes(packed(images[:100]))
    (root / "cifar10" / "test_00000_00005.npy.xz").write_bytes(packed(images[100:]))
    labels = generator.integers(0, 10, 106, dtype=np.uint8)
    np.savez(root / "cifar10" / "labels.npz", train=labels[:100], test=labels[100:])
    return root


@pytest.fixture(scope="module")
def run(root, run_protocol):
    return run_protocol(cifar, "cifar", TINY, root)


def test_report(run):
    folder, found = run
    rows = found["tables"]["cifar"]["rows"]
    assert [row[0] for row in rows] == [*map(str, cifar.REPLICAS), "softmax, moving average"]
    assert [row[2] for row in rows] == [
        -0.36,
        -0.32,
        -0.30,
        -0.29,
        -0.29,
        -0.28,
        -0.28,
        -0.28,
        -0.32,
    ]
    assert all(" ± " in row[1] for row in rows)
    assert found["remarks"][0].startswith("ResNet8, 100 training and 5 test images: accuracy ")
    assert found["remarks"][1].endswith("the levels do not compare.") and len(found["remarks"]) == 2
    units = [json.loads((folder / "units" / f"run-{i}.json").read_text())["result"] for i in (0, 1)]
    gains = [unit["pll"]["2"] - unit["plug_in"] for unit in units]
    assert rows[1][3] == f"{sum(gains) / 2:.3f} ± {abs(gains[0] - gains[1]) / 2:.3f}"
    printed = [-0.04, 0.0, 0.02, 0.03, 0.03, 0.04, 0.04, 0.04, None]
    assert [row[4] for row in rows] == printed
    assert (folder / "cifar.png").stat().st_size > 5_000


def test_picture():
    gains = {t: (0.01 * t, 0.0) for t in cifar.REPLICAS}
    ax = cifar.draw(gains, dict.fromkeys(cifar.REPLICAS, 0.5)).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_allclose(lines["here"].get_ydata(), [g for g, _ in gains.values()])
    np.testing.assert_allclose(lines["paper"].get_ydata(), 0.5)
    assert ax.get_xlabel() == "replicas T" and "softmax" in ax.get_ylabel()


def test_missing_data_are_named(tmp_path):
    for place in (None, str(tmp_path)):
        with pytest.raises(ValueError) as caught:
            cifar.make_units(TINY, place)
        assert str(caught.value) == (
            "cifar: data_root must hold the folder cifar10 (to be had from "
            f"https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz), got {place}"
        )


def test_resnet32_is_of_the_published_size():
    network = cifar.ResNet(5, 0.1)
    layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 32
    # He et al. 2016, table 6: 0.46 million; counted by hand, 464,154.
    assert sum(p.numel() for p in network.parameters()) == 464_154
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert network.units(torch.randn(1, 16, 32, 32)).shape == (1, 64, 8, 8)


def test_a_unit_without_weights_passes_its_input_on():
    unit = cifar.ResidualUnit(4, 8, 2, 0.1).eval()
    nn.init.zeros_(unit.conv2.weight)
    x = torch.randn(2, 4, 6, 6)
    pooled = x.unflatten(2, (3, 2)).unflatten(4, (3, 2)).mean((3, 5))
    expected = torch.cat([torch.zeros(2, 2, 3, 3), pooled, torch.zeros(2, 2, 3, 3)], 1)
    torch.testing.assert_close(unit(x), expected)
    shared = cifar.ResidualUnit(4, 4, 1, 0.1, shared=True).eval()
    nn.init.zeros_(shared.conv2.weight)
    normalised = x / (1 + 1e-3) ** 0.5  # by the running statistics 0 and 1
    torch.testing.assert_close(shared(x), torch.where(x > 0, normalised, 0.1 * normalised))
    assert [unit.shared for unit in cifar.ResNet(2, 0.1).units] == [True] + 5 * [False]


def test_every_image_is_a_crop():
    x = torch.rand(3, 3, 5, 6)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        images, rows = cifar.augmented(x, 2)
        assert rows.unique().numel() == 2
        for image, row in zip(images, rows.tolist(), strict=True):
            padded = torch.nn.functional.pad(x[row], (2, 2, 2, 2))
            places = {}
            for top, left, turn in itertools.product(range(5), range(5), (False, True)):
                crop = padded[:, top : top + 5, left : left + 6]
                places[top, left, turn] = crop.flip(2) if turn else crop
            whole = torch.stack([*places.values()]).double()
            flat = whole.flatten(1)
            flat = (flat - flat.mean(1, True)) / flat.std(1, correction=0, keepdim=True)
            gap = (flat - image.flatten()).abs().amax(1)
            assert gap.min() < 1e-4
            seen.add([*places][int(gap.argmin())])
    # 40 draws of 50 places: about 28 different ones.
    assert len(seen) > 15 and {turn for _, _, turn in seen} == {False, True}


def test_a_flat_image_is_zero():
    x = torch.stack([torch.full((3, 4, 4), 0.7), torch.rand(3, 4, 4)])
    found = cifar.standardised(x)
    assert found[0].abs().max() < 1e-5
    assert abs(found[1].mean()) < 1e-6 and abs(found[1].std(correction=0) - 1) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 8])
def test_likelihood_by_number_of_replicas(count):
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(8, 5, 10, generator=generator, dtype=torch.float64).softmax(2)
    y = torch.tensor([0, 3, 9, 1, 1])
    groups = [
        np.log(probs[i : i + count].mean(0).numpy()[range(5), y]).mean() for i in range(0, 8, count)
    ]
    assert cifar.pll(probs, y, count) == pytest.approx(np.mean(groups), rel=1e-12)


def test_training_follows_the_rates_and_decays_weights_alone(root, monkeypatch):
    made = record_sgd(monkeypatch)
    split = cifar.data.cifar10(root / "cifar10", num_validation=0)
    network = cifar.ResNet(1, 0.1)
    losses = cifar.train(network, split.train, TINY)
    assert made[0].rates == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert len(losses) == 4 and abs(losses[0] - np.log(10)) < 1.5
    decays = {
        p.dim(): group["weight_decay"] for group in made[0].param_groups for p in group["params"]
    }
    assert decays == {4: 2e-4, 2: 2e-4, 1: 0}
    assert not network.training


def test_a_unit_by_hand(root):
    """The same training, the same batches, and the replicas one by one."""
    settings = replace(TINY, train_batch_size=16, batch_size=4)
    found = cifar.compute(cifar.Unit("run-1", {"run": 1}), settings, str(root))
    split = cifar.data.cifar10(root / "cifar10", num_validation=0)
    x, y = split.test.x[:5], split.test.y[:5]
    torch.manual_seed(1)
    network = cifar.ResNet(1, 0.1)
    assert found["losses"] == pytest.approx(cifar.train(network, split.train, settings), rel=1e-4)
    batches = [cifar.augmented(split.train.x, 4)[0] for _ in range(128)]
    model = bnuq.convert(network)
    bank = bnuq.collect(model, batches, 128, progress=False)
    assert bank.batch_size == 4
    x = (x - x.mean((1, 2, 3), True)) / x.std((1, 2, 3), correction=0, keepdim=True)
    options = {"likelihood": "categorical", "num_samples": 128, "seed": 1, "keep_samples": True}
    probs = bnuq.predict(model, x, **options).samples.double().softmax(2)
    with torch.no_grad():
        plain = network(x).double().softmax(1)
    rows = torch.arange(5)
    expected = {
        "plug_in": plain[rows, y].log().mean().item(),
        "plug_in_accuracy": (plain.argmax(1) == y).double().mean().item(),
        "accuracy": (probs.mean(0).argmax(1) == y).double().mean().item(),
    }
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    assert found["pll"]["1"] == pytest.approx(probs[:, rows, y].log().mean().item(), rel=1e-5)
    whole = probs.mean(0)[rows, y].log().mean().item()
    assert found["pll"]["128"] == pytest.approx(whole, rel=1e-5)


def test_accuracy_is_of_the_mean_of_all_replicas(root, monkeypatch):
    samples = torch.randn(128, 6, 10, generator=torch.Generator().manual_seed(0))
    guess = samples.softmax(2).mean(0).argmax(1)
    assert (guess != samples[0].argmax(1)).any()
    split = cifar.data.cifar10(root / "cifar10", num_validation=0)
    told = split._replace(test=cifar.data.Part(split.test.x, guess))
    monkeypatch.setattr(cifar.data, "cifar10", lambda *_, **__: told)
    monkeypatch.setattr(cifar, "predict", lambda *_, **__: SimpleNamespace(samples=samples))
    settings = replace(TINY, steps=1, num_test=None)
    assert cifar.compute(cifar.make_units(TINY, root)[0], settings, root)["accuracy"] == 1


def test_remarks_by_hand():
    names = ("accuracy", "plug_in_accuracy", "train_images", "test_images")
    runs = [
        dict(zip(names, values, strict=True)) for values in ((0.8, 0.7, 9, 4), (0.9, 0.6, 9, 4))
    ]
    assert cifar.remarks(runs, cifar.FULL) == [
        "ResNet32, 9 training and 4 test images: accuracy 85.0 % with 128 replicas, 65.0 % without."
    ]


def test_what_agrees_with_the_paper():
    ours = {1: (-0.37, 0.01), 2: (-0.5, 0.01), "softmax": (-0.32, float("nan"))}
    text = cifar.comparison(ours, {1: -0.36, 2: -0.32, "softmax": -0.32})
    assert text == ["Within two standard errors of the paper: T = 1; not: 2."]


def test_less_data_on_request(root):
    unit = cifar.make_units(TINY, str(root))[0]
    found = cifar.compute(unit, replace(TINY, num_train=20, steps=1, num_test=2), str(root))
    assert (found["train_images"], found["test_images"]) == (20, 2)
    assert list(found["pll"]) == [str(t) for t in cifar.REPLICAS]
    assert found["pll"]["1"] <= found["pll"]["128"]
