"""The protocol of unseen classes, end to end on the digits, and its parts."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
import sklearn.metrics
import torch
from packed import idx
from real_data import REAL, needs_real_data

import bnuq_ext as bnuq
from bnuq_ext.protocols import ood, ood_report

pytestmark = pytest.mark.usefixtures("without_gpu", "on_one_thread")

SETTINGS = ood.Settings(
    cases=(("digits", "lenet-5", 4),),
    num_train=200,
    num_test=60,
    num_members=2,
    num_runs=2,
    num_samples=3,
    most_batches=6,
    noise_stds=(0.5,),
    blur_stds=(),
    rotations=(30.0,),
)


@pytest.fixture(scope="module")
def done(run_protocol):
    return run_protocol(ood, "ood", SETTINGS)


def outcomes_of(folder):
    units = ood.make_units(SETTINGS, None)
    found = [json.loads((folder / "units" / f"{u.name}.json").read_text()) for u in units]
    return ood_report.Outcomes([entry["result"] for entry in found])


def test_tables_have_every_method_with_every_kind_of_statistics(done):
    _, results = done
    table = results["tables"]["ood"]
    assert [row[:5] for row in table["rows"]] == [
        ["digits", "lenet-5", method, statistics, 4 if method == "one network" else 2]
        for method in ("one network", "dropout", "deep ensemble")
        for statistics in ("running", "SBN", "MCBN")
    ]
    assert table["columns"][5:] == [
        "error (%)", "NLL", "ECE", "AUROC of the entropy", "entropy, known", "entropy, unseen",
        "paper: error (%)", "paper: NLL",
    ]  # fmt: skip
    assert all(row[-2:] == [None, None] for row in table["rows"])
    assert len(results["tables"]["differences"]["rows"]) == 6
    corrupted = results["tables"]["corrupted"]["rows"]
    assert len(corrupted) == 18 and {row[4] for row in corrupted} == {"noise 0.5", "rotation 30"}
    paper = results["tables"]["paper"]
    assert paper["rows"][1][:5] == ["LeNet-5", "MNIST", "Deep Ensembles", "0.43", "0.00"]


def test_scores_are_those_of_another_package(done):
    folder, results = done
    outcomes = outcomes_of(folder)
    rows = {tuple(row[2:4]): row for row in results["tables"]["ood"]["rows"]}
    for (method, statistics), repetitions in outcomes.probs.items():
        scores = {"error": [], "nll": [], "auroc": []}
        for probs in repetitions:
            known, unknown = probs["known"].numpy(), probs["unknown"].numpy()
            scores["error"].append(100 * np.mean(known.argmax(1) != outcomes.y.numpy()))
            sums = known.sum(1, keepdims=True)  # 1 up to float32
            nll = sklearn.metrics.log_loss(outcomes.y, known / sums, labels=range(5))
            scores["nll"].append(nll)
            entropies = [scipy.stats.entropy(p, axis=1) for p in (known, unknown)]
            truth = [0] * len(known) + [1] * len(unknown)
            scores["auroc"].append(sklearn.metrics.roc_auc_score(truth, np.concatenate(entropies)))
        row = rows[method, statistics]
        for name, place, digits in (("error", 5, 2), ("nll", 6, 3), ("auroc", 8, 3)):
            values = np.array(scores[name])
            expected = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
            printed = [float(part) for part in row[place].split(" ± ")]
            assert row[place] == " ± ".join(f"{part:.{digits}f}" for part in printed)
            # Half a unit of the last digit, and what the two packages round apart.
            np.testing.assert_allclose(printed, expected, rtol=0, atol=0.501 * 10.0**-digits)


def test_an_ensemble_is_that_of_its_networks(done):
    outcomes = outcomes_of(done[0])
    images = ood.read_images("digits", SETTINGS, None)
    units = [u.arguments for u in ood.make_units(SETTINGS, None) if u.arguments["run"] == 1]
    models = []
    for arguments in units[:2]:
        torch.manual_seed(1000 + arguments["member"])
        models.append(ood.make_model(arguments, images.train, SETTINGS, torch.device("cpu")))
    x, options = images.known.x, {"likelihood": "categorical"}
    pred = bnuq.ensemble(models, x, **options)
    found = outcomes.probs["deep ensemble", "running"][1]["known"]
    torch.testing.assert_close(found.float(), pred.mean, rtol=1e-4, atol=1e-6)
    # The members' seeds follow one another, as the protocol's do.
    options |= {"num_samples": 3, "seed": 1000}
    for statistics, sampler in (("SBN", "lognormal"), ("MCBN", "bank")):
        pred = bnuq.ensemble(models, x, sampler=sampler, **options)
        found = outcomes.probs["deep ensemble", statistics][1]["known"]
        torch.testing.assert_close(found.float(), pred.mean, rtol=1e-3, atol=1e-5)


def test_only_convolutions_are_stochastic_and_dropout_is_behind_batch_norm(done):
    images = ood.read_images("digits", SETTINGS, None)
    arguments = ood.make_units(SETTINGS, None)[2].arguments
    assert arguments["dropout"]
    model = ood.make_model(arguments, images.train, SETTINGS, torch.device("cpu"))
    report = bnuq.doctor(model, images.known.x)
    assert list(report.converted) == ["1", "5"] and report.excluded_layers == ["10"]
    assert not any("dropout" in text for text in report.warnings)


def test_blur_and_rotation():
    x = torch.rand(3, 2, 12, 12)
    expected = scipy.ndimage.gaussian_filter(
        x.double().numpy(), (0, 0, 1.5, 1.5), radius=(0, 0, 4, 4), mode="nearest"
    )
    torch.testing.assert_close(
        ood.blur(x, 1.5).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(ood.rotate(x, 90.0), torch.rot90(x, 1, (2, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ood.rotate(x, 0.0), x, rtol=1e-5, atol=1e-5)


def test_numbers_survive_json():
    values = torch.rand(7, 3)
    again = ood_report.decode(json.loads(json.dumps(ood_report.encode(values))))
    assert torch.equal(again, values.double())


@pytest.fixture
def data_root(tmp_path):
    """Folders of 60 training and 40 test images of MNIST's format."""
    rng = np.random.default_rng(0)
    names = [
        (n, p, r) for n in ("mnist", "fashion-mnist") for p, r in (("train", 60), ("t10k", 40))
    ]
    for name, part, rows in names:
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        images, labels = rng.integers(256, size=(rows, 28, 28)), np.arange(rows) % 10
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder.parent


def test_files_are_parted_by_class(data_root):
    settings = replace(SETTINGS, num_train=None, num_test=15)
    images = ood.read_images("mnist", settings, str(data_root))
    assert images.train.x.shape == (30, 1, 28, 28) and images.train.y.unique().tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert images.known.x.shape == images.unknown.shape == (15, 1, 28, 28)
    assert set(images.known.y.tolist()) == set(range(5))
    test = bnuq.data.mnist(data_root / "mnist", num_validation=1).test
    for actual, rows in ((images.known.x, test.y < 5), (images.unknown, test.y >= 5)):
        assert torch.equal(actual.flatten(1), test.x[rows][:15])
    shown = ood.shown_images(images, settings)
    assert list(shown) == ["known", "unknown", "noise 0.5", "rotation 30"]


def test_unknown_digits_are_the_other_five():
    images = ood.read_images("digits", replace(SETTINGS, num_test=None), None)
    others = bnuq.data.digits(num_train=5, num_validation=5, classes=range(5, 10)).test.x
    assert torch.equal(images.unknown.flatten(1), others) and images.known.y.max() == 4


def test_images_that_are_shown():
    images = ood.read_images("digits", SETTINGS, None)
    settings = replace(SETTINGS, noise_stds=(0.1, 0.3), blur_stds=(2.0,), rotations=(20.0, 50.0))
    shown, x = ood.shown_images(images, settings), images.known.x
    assert torch.equal(shown["known"], x) and torch.equal(shown["unknown"], images.unknown)
    for std in (0.1, 0.3):
        assert torch.equal(shown[f"noise {std}"], bnuq.data.add_noise(x, std, seed=0))
    assert torch.equal(shown["blur 2"], ood.blur(x, 2.0 * 8 / 28))  # in 28ths of the width
    for degrees in (20.0, 50.0):
        assert torch.equal(shown[f"rotation {degrees:g}"], ood.rotate(x, degrees))
    assert len(shown) == 7


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_how_a_network_is_trained(dataset, monkeypatch):
    images, seen = ood.read_images("digits", SETTINGS, None), {}
    monkeypatch.setattr(ood, "train", lambda network, x, y, **options: seen.update(options))
    names = ("model", "x", "batches", "batch_size")
    monkeypatch.setattr(ood, "collect_random", lambda *a: seen.update(zip(names, a, strict=True)))
    arguments = {
        "dataset": dataset,
        "network": "lenet-5",
        "epochs": 4,
        "dropout": dataset == "digits",
    }
    settings = replace(SETTINGS, statistics_epochs=2, most_batches=None)
    model = ood.make_model(arguments, images.train, settings, torch.device("cpu"))
    assert (seen["epochs"], seen["augment"]) == (4, dataset == "cifar10")
    # 200 images are 12 whole batches of 16.
    assert (seen["batches"], seen["batch_size"], len(seen["x"])) == (2 * 12, 16, 200)
    assert model[12].p == (0.5 if dataset == "digits" else 0.0) and model[13].out_features == 5
    for most, expected in ((7, 7), (100, 24)):
        ood.make_model(
            arguments, images.train, replace(settings, most_batches=most), torch.device("cpu")
        )
        assert seen["batches"] == expected


def test_a_network_with_dropout_is_predicted_with_both(done):
    folder, _ = done
    images = ood.read_images("digits", SETTINGS, None)
    unit = ood.make_units(SETTINGS, None)[5]
    assert unit.name == "digits-lenet-5-1-dropout"
    found = json.loads((folder / "units" / f"{unit.name}.json").read_text())["result"]
    assert found["y"] == images.known.y.tolist()
    torch.manual_seed(1002)
    model = ood.make_model(unit.arguments, images.train, SETTINGS, torch.device("cpu"))
    for statistics, sampler in (("running", None), ("SBN", "lognormal"), ("MCBN", "bank")):
        options = {"likelihood": "categorical", "num_samples": 3, "seed": 1002, "sampler": sampler}
        pred = bnuq.mc_dropout(model, images.unknown, **options)
        actual = ood_report.decode(found["probs"][statistics]["unknown"]).float()
        torch.testing.assert_close(actual, pred.mean, rtol=1e-3, atol=1e-5)


def test_all_classes_of_one_set_against_another_set(data_root):
    cases = (("mnist-all", "lenet-5", 2),)
    settings = replace(SETTINGS, cases=cases, num_train=None, num_test=15, num_runs=1, batch_size=5)
    images = ood.read_images("mnist-all", settings, str(data_root))
    other = bnuq.data.mnist(data_root / "fashion-mnist", num_validation=10).test.x
    assert torch.equal(images.unknown.flatten(1), other[:15]) and len(images.train.x) == 59
    assert images.train.y.unique().tolist() == list(range(10))
    (unit, *_) = ood.make_units(settings, str(data_root))
    result = ood.compute(unit, settings, str(data_root))
    assert ood_report.decode(result["probs"]["SBN"]["known"]).shape == (15, 10)
    assert ood_report.Outcomes([result, result | {"dropout": True}]).num_classes == 10


@needs_real_data
def test_real_files():
    root = str(REAL)
    here = [case for case in ood.FULL.cases if case[0] != "digits"]
    here = [case for case in here if all((Path(root) / f).is_dir() for f in ood.FOLDERS[case[0]])]
    for dataset in {case[0] for case in here}:
        images = ood.read_images(dataset, ood.QUICK, root)
        assert len(images.train.x) == 4000 and images.known.y.max() == (
            9 if dataset == "mnist-all" else 4
        )


def test_units_are_those_whose_data_is_there(data_root):
    names = {u.arguments["dataset"] for u in ood.make_units(ood.FULL, str(data_root))}
    assert names == {"digits", "mnist", "mnist-all", "fashion-mnist"}
    for file in (data_root / "fashion-mnist").iterdir():
        file.unlink()
    with pytest.raises(
        ValueError, match="^mnist: root must hold train-images.* got .*fashion-mnist$"
    ):
        ood.make_units(ood.FULL, str(data_root))
    (data_root / "fashion-mnist").rmdir()
    names = {u.arguments["dataset"] for u in ood.make_units(ood.FULL, str(data_root))}
    assert names == {"digits", "mnist"}
    units = ood.make_units(ood.QUICK, None)
    assert len(units) == 12 and units[3].name == "digits-lenet-5-0-dropout"
    message = (
        r"ood: data_root must hold a folder cifar10, fashion-mnist, mnist \(MNIST's come from .*got"
    )
    with pytest.raises(ValueError, match=message):
        ood.make_units(ood.FULL, str(data_root / "mnist"))
    with pytest.raises(ValueError, match="ood: data_root must hold a folder mnist .* got None"):
        ood.make_units(replace(ood.QUICK, cases=(("mnist", "lenet-5", 1),)), None)


def invented(dataset="mnist", network="lenet-5"):
    """Units with probabilities out of thin air; those of drawn statistics are twice as sharp."""
    generator = torch.Generator().manual_seed(0)
    units = {}
    for run in range(3):
        for member in range(3):
            logits = torch.randn(2, 50, 5, generator=generator)
            logits[0, torch.arange(50), torch.arange(50) % 5] += 2
            parts = [
                {"known": (k * logits[0]).softmax(1), "unknown": (k * logits[1]).softmax(1)}
                for k in (1, 2, 2)
            ]
            probs = {
                name: {key: ood_report.encode(p) for key, p in part.items()}
                for name, part in zip(ood_report.STATISTICS, parts, strict=True)
            }
            about = {"dataset": dataset, "network": network, "run": run, "member": member}
            about |= {"dropout": member == 2, "y": (torch.arange(50) % 5).tolist()}
            units[f"{run}-{member}"] = about | {"probs": probs}
    return units


def test_the_papers_numbers_stand_beside(tmp_path):
    settings = replace(SETTINGS, cases=(("mnist", "lenet-5", 4), ("cifar10", "vgg-11", 9)))
    report = ood.report(invented(), settings, tmp_path)
    rows = {tuple(row[2:4]): row[-2:] for row in report.tables[0].rows}
    assert rows["one network", "SBN"] == ["0.53 ± 0.05", "0.025 ± 0.003"]
    assert rows["dropout", "running"] == ["0.51 ± 0.00", "0.016 ± 0.000"]
    assert rows["deep ensemble", "SBN"] == ["0.43 ± 0.00", "0.014 ± 0.001"]
    assert rows["one network", "running"] == rows["dropout", "MCBN"] == [None, None]
    missing, *_, beside = report.remarks
    assert missing == "Not run, since its folder is missing: cifar10 with vgg-11."
    assert beside.startswith(
        "mnist with lenet-5 against the paper, two standard errors: one network, SBN,"
    )
    assert "error (%): outside" in beside and "ten classes" in beside and "4 epochs" in beside


def test_differences_are_paired(tmp_path):
    report = ood.report(invented("digits"), SETTINGS, tmp_path)
    table = next(t for t in report.tables if t.name == "differences")
    outcomes = ood_report.Outcomes(list(invented("digits").values()))
    for row in table.rows:
        drawn, running = (outcomes.scores(row[2], n)["nll"] for n in (row[3], "running"))
        gaps = np.array(drawn) - np.array(running)
        error = gaps.std(ddof=1) / math.sqrt(len(gaps))
        mark = "=" if abs(gaps.mean()) <= 2 * error else "+" if gaps.mean() < 0 else "-"
        assert row[5] == f"{mark} {gaps.mean():.4f} ± {error:.4f}"
        assert (row[5].mean, row[5].error) == pytest.approx((gaps.mean(), error))
        assert row[4].startswith(
            "="
        )  # sharper probabilities have the same classes (but in ensembles)
    assert len(table.columns) == len(table.rows[0]) == 7
    for remark, name in zip(report.remarks, ("SBN", "MCBN"), strict=True):
        cells = [cell[0] for row in table.rows if row[3] == name for cell in row[4:]]
        counts = [cells.count(mark) for mark in "+-="]
        assert sum(counts) == 9 and remark.startswith(f"{name} against running statistics")
        assert (
            "better in {}, worse in {}, within two standard errors in {} of 9".format(*counts)
            in remark
        )
    one = {name: unit for name, unit in invented().items() if unit["run"] == 0}
    single = ood.report(one, replace(SETTINGS, cases=(("mnist", "lenet-5", 4),)), tmp_path)
    assert single.tables[1].rows[2][4] == "0.000"
    assert "not to be told" in single.remarks[-1]


def test_figures_show_every_curve(done):
    folder, results = done
    assert results["figures"] == ["entropy-digits-lenet-5.png", "corrupted-digits-lenet-5.png"]
    assert all((folder / name).stat().st_size > 10_000 for name in results["figures"])
    outcomes = outcomes_of(folder)
    figure = ood_report.draw_entropies(outcomes)
    assert [ax.get_title() for ax in figure.axes] == ["one network", "dropout", "deep ensemble"]
    for method, ax in zip(ood_report.METHODS, figure.axes, strict=True):
        lines = {line.get_label(): line for line in ax.get_lines()}
        for statistics in ood_report.STATISTICS:
            for kind, images in (("unseen", "unknown"), ("known", "known")):
                x = lines[f"{statistics}, {kind}"].get_xdata()[1:]
                expected = outcomes.entropies(method, statistics, images).sort().values
                np.testing.assert_allclose(x, expected)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()][:2] == ["running, unseen", "running, known"]
    figure = ood_report.draw_corrupted(outcomes)
    for method, ax in zip(ood_report.METHODS, figure.axes, strict=True):
        labels = [label.get_text() for label in ax.get_xticklabels()]
        assert labels == ["clean", "noise 0.5", "rotation 30"]
        for statistics, container in zip(ood_report.STATISTICS, ax.containers, strict=True):
            expected = [
                np.mean(outcomes.scores(method, statistics, images)["nll"])
                for images in ("known", "noise 0.5", "rotation 30")
            ]
            np.testing.assert_allclose(container[0].get_ydata(), expected)
    assert figure.axes[0].get_ylabel() == "NLL [nats], mean ± standard error"


def test_images_that_are_not_square_are_refused():
    assert ood._image_shape(torch.zeros(2, 3, 4, 5)) == (3, 4, 5)
    assert ood._image_shape(torch.zeros(2, 49)) == (1, 7, 7)
    with pytest.raises(
        ValueError, match="ood: data_root must hold square images, got some of 20 pi"
    ):
        ood._image_shape(torch.zeros(2, 20))
