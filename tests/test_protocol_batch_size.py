"""The runner of the batch-size protocol, end to end on tiny images in the format of Fashion-MNIST
and MNIST."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import idx
from rates import record_sgd
from sklearn.metrics import roc_auc_score
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.protocols import batch_size, batch_size_report

pytestmark = pytest.mark.usefixtures("without_gpu")

TINY = replace(
    batch_size.QUICK, num_train=200, num_validation=40, num_test=60, batch_sizes=(8, 32, 64), epochs=2, drops=(1,), num_seeds=1,
    num_samples=6, fit_trained_with=16, fit_batch_sizes=(4, 16, 64), fit_rows=50, fit_shares=(4,),
)  # fmt: skip


def write_images(root, seed):
    """Each class is a bright stripe at another height; the foreign set has them upright."""
    rng = np.random.default_rng(seed)
    root.mkdir()
    for part, count in (("train", 260), ("t10k", 80)):
        labels = rng.integers(10, size=count)
        images = rng.integers(0, 90, size=(count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            (image if seed == 0 else image.T)[2 * label + 3 : 2 * label + 6] += 150
        (root / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (root / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_images(root / "fashion-mnist", 0)
    write_images(root / "mnist", 1)
    return str(root)


@pytest.fixture(scope="module")
def done(data_root, run_protocol):
    return run_protocol(batch_size, "batch-size", TINY, data_root)


def test_tables(done):
    _, results = done
    table = results["tables"]["trained-with-M"]
    assert [row[0] for row in table["rows"]] == [8, 32, 64]
    assert table["columns"][-2:] == ["paper: accuracy, VGG-16", "paper: accuracy, ResNet-50"]
    assert [row[-2:] for row in table["rows"]] == [[None, None], [0.9429, 0.9343], [0.9436, 0.9377]]
    information = [float(row[5].split(" ± ")[0]) for row in table["rows"]]
    assert information[0] > information[1] > information[2] > 0
    fit = results["tables"]["choice-of-M"]
    assert fit["columns"][:4] == ["M", "E log p(training data)", "KL", "ELBO"]
    assert [row[0] for row in fit["rows"]] == [4, 16, 64, 200]
    assert fit["rows"][-1][2:4] == ["inf", "-inf"] and fit["rows"][-1][-2:] == [0.0, 0.0]
    for row in fit["rows"][:-1]:
        assert row[3] == pytest.approx(row[1] - row[2])
    assert fit["rows"][0][5] > fit["rows"][2][5] > 0


def test_uncertainty_vanishes_later_with_more_data(done):
    _, results = done
    table = results["tables"]["sizes-of-data"]
    assert table["columns"] == ["M", "N = 50", "N = 200"]
    by_size = {M: values for M, *values in table["rows"]}
    assert list(by_size) == [4, 16, 50, 64, 200]
    assert by_size[50] == [0.0, None] and by_size[200] == [None, 0.0]
    assert by_size[64][0] is None and by_size[64][1] > 0 and min(by_size[16]) > 0


def test_remarks_quote_the_numbers(done):
    _, results = done
    texts = " ".join(results["remarks"])
    for words in (
        "at M = 8",
        "at M = 64",
        "At M = N = 200 the mutual information is 0.0",
        "between 0.9427",
    ):
        assert words in texts
    assert "The ELBO is greatest at M = " in texts


def test_scores_are_those_of_a_plain_loop(data_root):
    """The same training by hand, the same batches, and the replicas one by one."""
    settings = replace(TINY, epochs=1)
    found = batch_size.compute(
        batch_size.Unit("M32-1", {"seed": 1, "batch_size": 32}), settings, data_root
    )
    images = batch_size.load(settings, data_root, 1)
    torch.manual_seed(1)
    network = batch_size.make_network("small", 10)
    batch_size.train(network, images.train, 32, settings)
    model = bnuq.convert(network)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="more than a tenth"):
        bank = bnuq.collect(model, torch.utils.data.TensorDataset(images.train.x), 6, batch_size=32)
    norms = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    probs = {"known": [], "foreign": []}
    plain = network(images.test.x).argmax(1)
    plain_nll = nn.functional.cross_entropy(network(images.test.x), images.test.y).item()
    for b in range(6):
        for name, m in norms.items():
            m.running_mean.copy_(bank.mean[name][b])
            m.running_var.copy_(bank.var[name][b])
        probs["known"].append(network(images.test.x).softmax(1))
        probs["foreign"].append(network(images.foreign).softmax(1))
    p = {k: torch.stack(v).detach().double() for k, v in probs.items()}
    entropy = {k: torch.special.entr(v.mean(0)).sum(1) for k, v in p.items()}
    information = {k: entropy[k] - torch.special.entr(v).sum(2).mean(0) for k, v in p.items()}
    y = images.test.y
    foreign = np.repeat([0, 1], [len(y), len(images.foreign)])

    def auroc(scores):
        return roc_auc_score(foreign, torch.cat([scores["known"], scores["foreign"]]))

    mean = p["known"].mean(0)
    expected = {
        "plug_in_accuracy": (plain == y).double().mean(),
        "plug_in_nll": plain_nll,
        "accuracy": (mean.argmax(1) == y).double().mean(),
        "nll": -mean[torch.arange(len(y)), y].log().mean(),
        "information_in": information["known"].mean(),
        "information_out": information["foreign"].mean(),
        "auroc_entropy": auroc(entropy),
        "auroc_information": auroc(information),
    }
    for name, value in expected.items():
        # A rank of two nearly equal scores may turn in float32.
        assert found[name] == pytest.approx(
            float(value), rel=1e-3, abs=1e-3 if "auroc" in name else 1e-5
        ), name


def test_figures(done, data_root):
    folder, results = done
    assert results["figures"] == ["trained-with-M.png", "choice-of-M.png"]
    assert all((folder / name).stat().st_size > 5000 for name in results["figures"])
    unit = batch_size.make_units(TINY, data_root)[0]
    fit = batch_size.compute(unit, replace(TINY, epochs=1), data_root)
    figure = batch_size_report.draw_fit(fit)
    bound, nll, information = figure.axes
    lines = {line.get_label(): line for ax in figure.axes for line in ax.get_lines()}
    assert lines["ELBO"].get_xdata().tolist() == [4, 16, 64, 200]
    assert np.allclose(lines["ELBO"].get_ydata()[:3], fit["elbo"][:3]) and np.isnan(
        lines["ELBO"].get_ydata()[3]
    )
    assert lines["foreign"].get_ydata()[-1] == 0 and "plug-in BN" in lines
    assert (
        f"best: M = {fit['best_by_elbo']}" in lines and f"best: M = {fit['best_by_nll']}" in lines
    )
    low, high = bound.get_ylim()
    assert low < max(fit["elbo"][:3]) < high
    assert "nats" in nll.get_ylabel() and "nats" in information.get_ylabel()


def test_the_choice_is_made_on_validation_images(data_root):
    """Curves of known and foreign images, prior, plug-in, and shares,
    of the network trained with M = 16."""
    settings = replace(TINY, epochs=1, fit_batch_sizes=(8, 32), num_samples=4, weight_decay=0.01)
    found = batch_size.compute(batch_size.make_units(settings, data_root)[0], settings, data_root)
    images = batch_size.load(settings, data_root, 0)
    torch.manual_seed(0)
    network = batch_size.make_network("small", 10)
    batch_size.train(network, images.train, 16, settings)
    data = torch.utils.data.TensorDataset
    options = {"likelihood": "categorical", "num_samples": 4, "seed": 0, "progress": False}
    options["prior"] = bnuq.implied_prior(0.005, 200)
    sets = data(*images.validation), data(images.foreign, torch.zeros(60, dtype=torch.int64))
    known, foreign = (
        bnuq.fit_batch_size(
            bnuq.convert(network),
            data(*images.train),
            (8, 32, 200),
            validation=v,
            num_rows=50,
            **options,
        )
        for v in sets
    )
    assert found["batch_sizes"] == [8, 32, 200] and found["train_rows"] == 200
    for name, curve in (
        ("log_likelihood", known.log_likelihood),
        ("kl", known.kl),
        ("elbo", known.elbo),
        ("nll", known.nll),
        ("information_in", known.mutual_information),
        ("information_out", foreign.mutual_information),
    ):
        expected = torch.where(curve.isinf(), torch.nan, curve)  # None in JSON
        actual = np.array(found[name], float)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7, err_msg=name)
    x, y = images.validation
    plain = nn.functional.cross_entropy(network(x), y).item()
    assert found["plug_in_nll"] == pytest.approx(plain, rel=1e-5)
    (share,) = found["shares"]
    assert share["train_rows"] == 50 and share["batch_sizes"] == [8, 32, 50]
    some = data(images.train.x[:50], images.train.y[:50])
    fit = bnuq.fit_batch_size(
        bnuq.convert(network), some, (8, 32, 50), validation=sets[0], num_rows=1, **options
    )
    curve = fit.mutual_information.tolist()
    assert share["information_in"] == pytest.approx(curve, rel=1e-4, abs=1e-7)


def test_training_follows_the_rates(data_root, monkeypatch):
    made = record_sgd(monkeypatch)
    part = batch_size.load(TINY, data_root, 0).train
    settings = replace(TINY, epochs=4, drops=(1, 3), weight_decay=0.01)
    batch_size.train(batch_size.make_network("small", 10), part, 64, settings)
    assert made[0].rates == pytest.approx(3 * [0.1] + 6 * [0.01] + 3 * [0.001])
    assert (made[0].defaults["momentum"], made[0].defaults["weight_decay"]) == (0.9, 0.01)


def test_images_are_scaled_by_the_training_part(data_root):
    images = batch_size.load(TINY, data_root, 0)
    root = Path(data_root)
    known = bnuq.data.mnist(root / "fashion-mnist", num_validation=40)
    train = known.train.x[:200].double()
    foreign = bnuq.data.mnist(root / "mnist", num_validation=1).test.x[:60]
    for actual, x in ((images.test.x, known.test.x[:60]), (images.foreign, foreign)):
        expected = (x.double() - train.mean()) / train.std()
        torch.testing.assert_close(actual.flatten(1).double(), expected, rtol=1e-5, atol=1e-5)


def test_vgg16_trains_on_padded_images(data_root):
    settings = replace(TINY, network="vgg16", num_train=40, num_test=8, epochs=1, num_samples=2)
    unit = batch_size.Unit("M8-0", {"seed": 0, "batch_size": 8})
    found = batch_size.compute(unit, settings, data_root)
    assert 0 <= found["accuracy"] <= 1 and found["information_in"] > 0
    layers = list(batch_size.make_network("vgg16", 10).modules())
    assert sum(isinstance(m, nn.Conv2d) for m in layers) == 13
    assert (
        sum(p.numel() for m in layers if isinstance(m, nn.Conv2d) for p in m.parameters())
        == 14_709_312
    )


def test_digits_are_at_hand():
    settings = replace(TINY, digits_batch_sizes=(8, 64))
    assert [u.name for u in batch_size.make_units(settings, None)] == ["fit-0", "M64-0", "M8-0"]
    images = batch_size.load(settings, None, 0)
    assert images.test.y.unique().tolist() == [0, 1, 2, 3, 4] and images.foreign.shape[1:] == (
        1,
        8,
        8,
    )
    assert abs(images.train.x.mean()) < 1e-5 and abs(images.train.x.std() - 1) < 1e-5
    found = batch_size.compute(
        batch_size.Unit("M64-0", {"seed": 0, "batch_size": 64}), settings, None
    )
    assert found["information_out"] > 0


def test_the_quick_settings_know_the_papers_table():
    paper = batch_size_report.printed()
    assert all(("VGG-16", M) in paper for M in batch_size.QUICK.batch_sizes)
    assert paper["VGG-16", 2048] == 0.9486 and paper["ResNet-50", 32] == 0.9343


def test_rejects(data_root, tmp_path):
    with pytest.raises(ValueError, match="hold train-images-idx3-ubyte"):
        batch_size.make_units(TINY, str(tmp_path))
    with pytest.raises(
        ValueError, match="batch_sizes must be less than the 200 training images, got 200"
    ):
        batch_size.make_units(replace(TINY, batch_sizes=(200,)), data_root)
    few = f"{Path(data_root) / 'fashion-mnist'} must hold 541 training images or more, got "
    with pytest.raises(ValueError, match=re.escape(f"reproduce: {few}")):
        batch_size.make_units(replace(TINY, batch_sizes=(500,)), data_root)
    with pytest.raises(ValueError, match="network must be small or vgg16, got 'big'"):
        batch_size.make_network("big", 10)
    with pytest.raises(
        ValueError, match="data_root must hold fashion-mnist and mnist, since .* None"
    ):
        batch_size.make_units(batch_size.FULL, None)
