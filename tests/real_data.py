"""The real data sets, where the environment names their folder; the project ships none."""

import os
from pathlib import Path

import pytest

REAL = Path(os.environ.get("BNUQ_DATA", ""))
needs_real_data = pytest.mark.skipif(
    not os.environ.get("BNUQ_DATA"),
    reason="BNUQ_DATA does not name the folder of uci, mnist, fashion-mnist, cifar10, camvid",
)
