"""The data sets that scikit-learn carries, for a first run without any file."""

from collections.abc import Iterable

import torch

from ..ops.checks import check_integer, check_within, refuse
from .parts import Part, Split, take


def digits(
    *,
    num_train: int = 300,
    num_validation: int = 300,
    seed: int = 0,
    classes: Iterable[int] = range(10),
) -> Split:
    """Scikit-learn's 1,797 handwritten digits of 8x8 pixels, split at random,
    class by class in proportion.

    Args:
        num_train, num_validation: rows of these parts; the rest is the test part.
        seed: of the split; in [0, 2^32).
        classes: the digits to keep; labels stay as they are.

    Returns:
        Split; x (N, 64) float32 in [0, 1], y (N,) int64.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError, TypeError: an argument is out of range, or a part would be empty.
    """
    sklearn = _scikit("digits")
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    if not isinstance(classes, Iterable):
        refuse("digits", "classes", "be a list of digits", type(classes).__name__, TypeError)
    classes = {check_integer("digits", "classes", k, 0) for k in classes}
    if not classes or max(classes) > 9:
        refuse("digits", "classes", "be some of the digits 0 to 9", sorted(classes))
    check_within("digits", "seed", seed, 0, 2**32, "[0, 2^32)")
    kept = torch.tensor(sorted(classes), device="cpu")
    rows = torch.isin(y, kept).nonzero().squeeze(1)
    counts = [
        check_integer("digits", name, value, 1)
        for name, value in (("num_train", num_train), ("num_validation", num_validation))
    ]
    if min(*counts, len(rows) - sum(counts)) < len(classes):
        requirement = f"leave each part of the {len(rows)} rows one of each class or more"
        refuse("digits", "num_train and num_validation", requirement, tuple(counts))

    def split(some, count):
        options = {"train_size": count, "stratify": y[some], "random_state": seed}
        return sklearn.model_selection.train_test_split(some, **options)

    train, rest = split(rows, counts[0])
    validation, rest = split(rest, counts[1])
    return Split(*(take(Part(x, y), some) for some in (train, validation, rest)))


def diabetes() -> Part:
    """Scikit-learn's 442 patients: ten measurements and the progression of diabetes a year later.

    Returns:
        Part; x (442, 10) float64 in raw units (age in years, sex 1 or 2, body mass index, blood
        pressure, six of serum), y (442,) float64, from 25 to 346.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    x, y = _scikit("diabetes").datasets.load_diabetes(return_X_y=True, scaled=False)
    return Part(torch.from_numpy(x), torch.from_numpy(y))


def _scikit(op: str):
    try:
        import sklearn.datasets
        import sklearn.model_selection
    except ModuleNotFoundError as error:
        requirement = "be installed (pip install 'bnuq_ext[demo]')"
        refuse(op, "scikit-learn", requirement, error, ModuleNotFoundError)
    return sklearn
