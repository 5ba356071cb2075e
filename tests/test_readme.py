"""What the README says holds: its code runs, its numbers are those of the recorded run,
its names exist."""

import ast
import copy
import json
import re
import sys
from pathlib import Path

import lightning_stand_in
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bnuq_ext
from bnuq_ext import ops
from bnuq_ext.experiments import digits, digits_report

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
RECORDED = json.loads((ROOT / "docs" / "digits.json").read_text())


def network(outputs):
    first = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, outputs))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What a reader has at hand before the first line."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(320, 64), torch.randint(10, (320,)))
    model = network(10).requires_grad_(False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lightning", lightning_stand_in.module())
    original = copy.deepcopy(model)
    return {
        "torch": torch,
        "nn": nn,
        "model": model,
        "original": original,
        "layers": {n: m for n, m in original.named_modules() if isinstance(m, nn.BatchNorm1d)},
        "regressor": network(1),
        "plain_network": network(10),
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=16, shuffle=True),
        "test_loader": DataLoader(dataset, batch_size=100),
        "x": torch.rand(20, 64),
        "y": torch.randint(10, (20,)),
    }


def run(block, names):
    exec(compile(block, "README.md", "exec"), names)


def test_code_runs_in_order(names, capsys):
    assert len(BLOCKS) == 7
    run(BLOCKS[0], names)
    pred = names["pred"]
    run(BLOCKS[1], names)
    for name in ("mean", "entropy", "mutual_information"):
        torch.testing.assert_close(names[name], getattr(pred, name), rtol=1e-4, atol=1e-6)
    assert pred.mutual_information.max() > 1e-3
    run(BLOCKS[2], names)
    assert "2 stochastic layers" in capsys.readouterr().out
    assert torch.equal(names["pred"].targets, names["dataset"].tensors[1])
    assert names["logits"].shape == (160, 10)
    run(BLOCKS[3], names)
    assert Path("entropy.png").stat().st_size > 1000
    run(BLOCKS[4], names)
    assert torch.equal(names["pred"].total_variance, names["pred"].variance + 0.1)
    assert type(names["model"][1]) is nn.BatchNorm1d
    run(BLOCKS[5], names)
    assert issubclass(names["Classifier"], lightning_stand_in.LightningModule)
    run(BLOCKS[6], names)
    assert names["pred"].mutual_information.max() > 1e-6
    masks = [m.weight_mask for m in names["net"] if isinstance(m, bnuq_ext.BayesLinear)]
    assert sum(int((~mask).sum()) for mask in masks) == round(0.75 * len(names["summary"].snr))


def test_lightning_block_is_the_example():
    example = (ROOT / "examples" / "with_lightning.py").read_text()
    assert BLOCKS[5][BLOCKS[5].index("class ") :] in example


def cells(values):
    return " | ".join(f"{v['mean']:.3f} ± {v['error']:.3f}" for v in values)


def test_numbers_are_the_recorded_ones():
    for row in digits.ROWS:
        for score in digits_report.SCORES:
            line = cells(RECORDED["noisy"][std][row][score] for std in RECORDED["noisy"])
            assert f"| {row} | {line} |" in TEXT
        line = cells(RECORDED["unseen"][row][k] for k in digits_report.UNSEEN)
        assert f"| {row} | {line} |" in TEXT
    assert "\n".join(digits_report.comparisons(RECORDED)) in TEXT
    assert RECORDED["unseen_compared"].keys() == RECORDED["compared"].keys()
    assert f"commit {RECORDED['commit']}" in TEXT


def test_recorded_run_has_the_settings_of_the_demo():
    settings = json.loads(json.dumps(digits.asdict(digits.Settings())))
    assert RECORDED["settings"] == settings
    assert RECORDED["curve"]["noisy"]["mutual_information"][-1] == 0.0


def anchors_of(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    kept = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def is_there(target, page):
    """Whether a link's file exists, and its heading in it."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or anchor in anchors_of(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_figures_exist(page):
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert [t for t in targets if not is_there(t, page)] == []


def test_readme_shows_its_figures():
    shown = set(re.findall(r"^!\[.*\]\((.+)\)$", TEXT, re.MULTILINE))
    names = ("verdict", "batch_size", "entropy_cdf")
    assert shown == {f"docs/figures/{name}.png" for name in names}


def test_every_op_is_in_the_table():
    public = {n for n in vars(ops) if not n.startswith("_") and callable(getattr(ops, n))}
    missing = [n for n in public - {"PredictiveStatistics"} if f"`{n}`" not in TEXT]
    assert missing == []


def test_every_public_name_is_shown():
    public = {n for n in vars(bnuq_ext) if callable(getattr(bnuq_ext, n)) and n[0] != "_"}
    returned = {"Prediction", "DoctorReport", "Elbo", "PosteriorSummary", "LayerNormality"}
    hidden = {n for n in public if n.startswith("Stochastic")} | returned
    assert [n for n in sorted(public - hidden) if f"bnuq.{n}" not in TEXT] == []


def test_commands_and_variables_exist():
    makefile, setup = (ROOT / "Makefile").read_text(), (ROOT / "setup.py").read_text()
    verbs = set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE))
    assert verbs == {"demo", "test", "lint", "bench", "gpu", "test-matrix", "clean"}
    assert [v for v in verbs if not re.search(rf"^{v}:", makefile, re.MULTILINE)] == []
    variables = re.findall(r"^\| `([A-Z_]+)` \|", TEXT, re.MULTILINE)
    assert len(variables) == 4 and [v for v in variables if v not in setup] == []


def imports(path):
    """The modules of this package that a file imports as it is imported."""
    package = ("bnuq_ext", *path.relative_to(ROOT / "bnuq_ext").parts)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level]
            tails = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (".".join((*base, tail)) for tail in tails)


def test_modules_import_from_their_own_row_and_those_above_it():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| modules |") :].split("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table if line]
    row_of = {name: i for i, names in enumerate(rows) for name in names}
    below = {"ops", "_library", "_version"}
    apart = {"__init__", "__main__", "reference"}
    found = {path.stem for path in (ROOT / "bnuq_ext").glob("*.py")}
    found |= {path.parent.name for path in (ROOT / "bnuq_ext").glob("*/__init__.py")}
    assert found - below - apart == set(row_of)
    for path in (ROOT / "bnuq_ext").rglob("*.py"):
        own = path.relative_to(ROOT / "bnuq_ext").parts[0].removesuffix(".py")
        if own in row_of:
            used = {name.split(".")[1] for name in imports(path)} & row_of.keys()
            assert [name for name in used if row_of[name] > row_of[own]] == [], path
