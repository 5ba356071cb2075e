"""Folders of MNIST's files that the protocol of unseen classes cannot use."""

from dataclasses import replace

import numpy as np
import pytest
from packed import idx
from test_data_files import refusal

from bnuq_ext.protocols import ood

QUICK = replace(ood.QUICK, num_runs=1, num_members=1)
ALL = replace(QUICK, cases=(("mnist-all", "lenet-5", 1),))


def write(folder, train, test):
    """Images of 28 by 28 pixels with these labels."""
    folder.mkdir(exist_ok=True)
    for part, labels in (("train", train), ("t10k", test)):
        images = np.zeros((len(labels), 28, 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def labels(num_rows, num_classes=10):
    return (np.arange(num_rows) % num_classes).tolist()


KNOWN, ENOUGH = labels(40, 5), labels(40)
CASES = {
    "few known to train on": (QUICK, KNOWN[:15] + [7] * 30, ENOUGH, "hold at least 16 training images of known classes, got 15"),
    "few to train on": (ALL, ENOUGH[:15], ENOUGH, "hold at least 16 training images of known classes, got 15"),
    "none to test on": (QUICK, ENOUGH, [], "hold images for the test part, got none"),
    "no known to test on": (QUICK, ENOUGH, [5, 9], "hold at least 1 test images of known classes, got 0"),
    "none unseen": (QUICK, ENOUGH, KNOWN, "hold at least 1 test images of unseen classes, got 0"),
    "label": (QUICK, ENOUGH, [10], "hold labels in [0, 10), got 10 in the test part"),
}  # fmt: skip


@pytest.mark.parametrize("settings, train, test, message", CASES.values(), ids=CASES)
def test_a_folder_of_too_few_images_is_named(settings, train, test, message, tmp_path):
    write(tmp_path / "mnist", [*train, 6], test)  # the last one is held out
    write(tmp_path / "fashion-mnist", ENOUGH, ENOUGH)
    found = refusal(ood.make_units, settings, str(tmp_path))
    assert found == f"ood: {tmp_path / 'mnist'} must {message}"


def test_the_folder_of_unseen_images_is_named(tmp_path):
    write(tmp_path / "mnist", ENOUGH, KNOWN)  # all of whose classes are known
    write(tmp_path / "fashion-mnist", ENOUGH, ENOUGH)
    assert len(ood.make_units(ALL, str(tmp_path))) == 2
    write(tmp_path / "fashion-mnist", ENOUGH, [])
    message = f"ood: {tmp_path / 'fashion-mnist'} must hold images for the test part, got none"
    assert refusal(ood.make_units, ALL, str(tmp_path)) == message
