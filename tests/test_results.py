"""docs/results.md holds the tables of the recorded runs, and the figures that it shows exist."""

import json
import re
from pathlib import Path

import pytest

from bnuq_ext import protocols
from bnuq_ext.protocols.results import Table

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "results.md").read_text()
RECORDED = {path.stem: json.loads(path.read_text()) for path in (DOCS / "results").glob("*.json")}


def test_what_was_run():
    least = {"uci", "toy", "normality", "batch-size", "ood", "deep", "segmentation"}
    assert least <= {recorded["protocol"] for recorded in RECORDED.values()} <= {*protocols.NAMES}


@pytest.mark.parametrize("name", RECORDED)
def test_tables_and_remarks_are_those_of_the_run(name):
    recorded = RECORDED[name]
    assert f"bnuq reproduce {recorded['protocol']}" in TEXT and recorded["title"] in TEXT
    for table in recorded["tables"].values():
        assert table["title"] in TEXT and Table(**table).markdown() in TEXT
    for remark in recorded["remarks"]:
        assert remark in TEXT


def test_how_much_of_uci_agrees():
    tables = [RECORDED["uci"]["tables"][name]["rows"] for name in ("normalised", "raw", "rmse")]
    for name, found in (("boston", "11 of 12"), ("wine", "9 of 12")):
        cells = [row[-1] for rows in tables for row in rows if row[0] == name]
        assert f"{cells.count('yes')} of {len(cells)}" == found and f"{name} ({found})" in TEXT


def test_figures_exist():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert shown and all((DOCS / path).is_file() for path in shown)
