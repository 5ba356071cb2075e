"""The source papers' protocols, each a module of units of work and a report;
`bnuq reproduce` runs them."""

from importlib import import_module
from types import ModuleType

from ..ops.checks import check_one_of

NAMES = (
    "batch-size",
    "cifar",
    "deep",
    "normality",
    "ood",
    "segmentation",
    "sensitivity",
    "toy",
    "uci",
)


def protocol(name: str) -> ModuleType:
    """The module of a protocol: TITLE, Settings, QUICK, FULL, make_units, sources, compute, report.

    sources(settings, data_root) are the files that the numbers depend on, or folders of them.
    WITHOUT_DATA names what it runs on without a data root, in the quick form; None: it needs one.
    """
    check_one_of("reproduce", "name", name, NAMES)
    return import_module(f".{name.replace('-', '_')}", __name__)
