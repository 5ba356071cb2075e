"""CamVid's PNG files of sizes of their own, and labels that do not belong to an image."""

import numpy as np
import pytest
import torch
from packed import packed
from PIL import Image
from test_data_files import refusal

from bnuq_ext import data

RNG = np.random.default_rng(0)


def save(root, part, images, labels):
    for folder, values in ((part, images), (f"{part}annot", labels)):
        (root / folder).mkdir(exist_ok=True)
        for i, value in enumerate(values):
            Image.fromarray(value).save(root / folder / f"{i}.png")


def frames(count, height, width):
    images = RNG.integers(256, size=(count, height, width, 3), dtype=np.uint8)
    return images, RNG.integers(12, size=(count, height, width), dtype=np.uint8)


@pytest.fixture
def root(tmp_path):
    for part in ("train", "test"):
        save(tmp_path, part, *frames(2, 8, 12))
    return tmp_path


@pytest.mark.parametrize("height, width", [(7, 5), (8, 5), (7, 4)])
def test_an_odd_row_or_column_is_cut_off(root, height, width):
    images, labels = frames(2, height, width)
    save(root, "test", images, labels)
    x, y = data.camvid(root, num_validation=1).test
    means = torch.nn.functional.avg_pool2d(torch.from_numpy(images).movedim(3, 1).double(), 2)
    assert torch.equal(x, (means.round() / 255).float())
    for i in range(height // 2):
        for j in range(width // 2):
            assert y[:, i, j].tolist() == labels[:, 2 * i, 2 * j].tolist()
    assert y.shape == (2, height // 2, width // 2)


@pytest.mark.parametrize("shape", [(8, 13), (8, 12, 3), (4, 6)])
def test_labels_of_another_shape_are_named(root, shape):
    path = root / "trainannot" / "1.png"
    Image.fromarray(np.zeros(shape, np.uint8)).save(path)
    requirement = "hold one label for each pixel of its image [8, 12]"
    got = f"an array of shape {list(shape)}"
    message = f"camvid: {path} must {requirement}, got {got}"
    assert refusal(data.camvid, root, num_validation=1) == message


def test_a_part_without_frames_is_said_to_have_none(tmp_path):
    for part, count in (("train", 2), ("test", 0)):
        for name, values in zip(("images", "labels"), frames(count, 4, 6), strict=True):
            (tmp_path / f"{part}_{name}.npy.xz").write_bytes(packed(values))
    path = tmp_path / "test_labels.npy.xz"
    message = f"camvid: {path} must hold frames, got labels of shape [0, 4, 6]"
    assert refusal(data.camvid, tmp_path, num_validation=1) == message
