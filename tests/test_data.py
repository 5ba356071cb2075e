"""Data sets: sizes, scale, no row in two parts, and what is said of what is missing or damaged."""

import gzip
import math
import re
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from bnuq_ext import data


def test_parts_are_disjoint_and_complete():
    parts = data.digits(seed=3)
    assert [len(part.x) for part in parts] == [300, 300, 1197]
    everything = torch.cat([torch.cat([part.x, part.y[:, None]], 1) for part in parts])
    # The 1,797 images are all different.
    assert len(everything.unique(dim=0)) == 1797
    assert parts.train.x.dtype == torch.float32 and parts.train.y.dtype == torch.int64
    assert everything[:, :64].min() == 0 and everything[:, :64].max() == 1


def test_classes_and_proportions():
    known = data.digits(num_train=200, num_validation=100, classes=range(5))
    assert sum(len(part.x) for part in known) == 901
    assert known.train.y.bincount().tolist() == [40, 40, 39, 41, 40]
    assert known.test.y.max() == 4


def test_split_depends_on_the_seed_alone():
    assert torch.equal(data.digits(seed=1).train.x, data.digits(seed=1).train.x)
    assert not torch.equal(data.digits(seed=1).train.x, data.digits(seed=2).train.x)


def test_noise_scales_one_draw():
    x = torch.rand(500, 64)
    one, two = data.add_noise(x, 0.1, seed=0) - x, data.add_noise(x, 0.2, seed=0) - x
    torch.testing.assert_close(2 * one, two, rtol=0, atol=1e-6)
    # n = 32,000, fixed seed: five standard errors, 0.1 / sqrt(n) and 0.1 / sqrt(2 n).
    assert abs(one.mean()) < 5 * 0.1 / 32000**0.5
    assert abs(one.std() - 0.1) < 5 * 0.1 / 64000**0.5
    assert torch.equal(data.add_noise(x, 0.0, seed=0), x)
    other = (data.add_noise(x, 0.1, seed=1) - x) / 0.1
    # Another seed's draw is another: five standard errors of a correlation, 1 / sqrt(n).
    assert abs((10 * one * other).mean()) < 5 / 32000**0.5


def test_rejects():
    with pytest.raises(ValueError) as caught:
        data.digits(num_train=1700, num_validation=97)
    assert str(caught.value) == (
        "digits: num_train and num_validation must leave each part of the 1797 rows one of each "
        "class or more, got (1700, 97)"
    )
    with pytest.raises(
        ValueError, match="num_validation must leave each part .* got \\(5, 300\\)$"
    ):
        data.digits(num_train=5)
    for classes in ([], [3, 10]):
        with pytest.raises(ValueError) as caught:
            data.digits(classes=classes)
        assert str(caught.value) == (
            f"digits: classes must be some of the digits 0 to 9, got {classes}"
        )
    with pytest.raises(TypeError, match="^digits: num_train must be an integer, got 1.5$"):
        data.digits(num_train=1.5)
    for std in (-1, math.nan):
        message = f"^add_noise: std must be finite and not negative, got {std}$"
        with pytest.raises(ValueError, match=message):
            data.add_noise(torch.zeros(1), std, seed=0)
    with pytest.raises(TypeError, match="^add_noise: std must be a number, got 'a'$"):
        data.add_noise(torch.zeros(1), "a", seed=0)
    with pytest.raises(TypeError, match="^add_noise: seed must be an integer, got 'a'$"):
        data.add_noise(torch.zeros(1), 0.5, seed="a")
    with pytest.raises(TypeError, match="^digits: classes must be a list of digits, got int$"):
        data.digits(classes=5)
    with pytest.raises(ValueError, match=r"^digits: seed must lie in \[0, 2\^32\), got -1$"):
        data.digits(seed=-1)
    with pytest.raises(TypeError, match="^add_noise: x must be a floating-point tensor, got torch"):
        data.add_noise(torch.zeros(1, dtype=torch.uint8), 0.5, seed=0)


@pytest.mark.parametrize(
    "call",
    [
        data.mnist,
        data.cifar10,
        data.camvid,
        data.image_folder,
        data.table,
        data.arrays,
        data.read_idx,
    ],
)
def test_a_path_must_be_one(call):
    name = "path" if call in (data.table, data.arrays, data.read_idx) else "root"
    with pytest.raises(
        TypeError, match=f"^{call.__name__}: {name} must be a str or an os.PathLike, got NoneType$"
    ):
        call(None)


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_a_folder_is_no_file_of_cifar10(tmp_path, name):
    for file in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / file).write_bytes(bytes(2 * 3073))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(ValueError) as caught:
        data.cifar10(tmp_path, num_validation=1)
    message = f"cifar10: path must hold records of 3073 bytes, got {path}, a folder"
    assert str(caught.value) == message


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        data.digits()
    assert str(caught.value).startswith(
        "digits: scikit-learn must be installed (pip install 'bnuq_ext[demo]'), got "
    )


def test_diabetes_is_the_raw_table():
    part = data.diabetes()
    assert part.x.shape == (442, 10) and part.x.dtype == part.y.dtype == torch.float64
    assert sorted(part.x[:, 1].unique().tolist()) == [1, 2]
    assert (part.y.min(), part.y.max()) == (25, 346)


def test_diabetes_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"^diabetes: scikit-learn must be installed \("):
        data.diabetes()


def idx(*shape, code=0x08):
    header = struct.pack(f">{len(shape) + 1}I", code << 8 | len(shape), *shape)
    return header + bytes(k % 251 for k in range(math.prod(shape)))


@pytest.fixture
def mnist_files(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(9, 4, 5), mtime=0))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(9))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(3, 4, 5))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(3), mtime=0))
    return tmp_path


@pytest.mark.parametrize("dtype,mode", [(np.uint16, "I;16"), (np.int32, "I"), (np.float32, "F")])
def test_images_of_wider_pixels_are_refused(tmp_path, dtype, mode):
    """Pillow would cut them off at 255."""
    (tmp_path / "cat").mkdir()
    path = tmp_path / "cat" / "a.tif"
    Image.fromarray(np.linspace(0, 60000, 35).astype(dtype).reshape(5, 7)).save(path)
    path = path.rename(path.with_suffix(".png"))  # Pillow goes by the content
    text = f"image_folder: {path} must have 8 bits a channel, got an image of Pillow's mode {mode}"
    with pytest.raises(ValueError, match=re.escape(text)):
        data.image_folder(tmp_path)


def test_mnist_keeps_the_last_training_rows_to_validate(mnist_files):
    split = data.mnist(mnist_files, num_validation=2)
    assert [part.x.shape for part in split] == [(7, 20), (2, 20), (3, 20)]
    torch.testing.assert_close(split.train.x[0], torch.arange(20.0) / 255)
    assert split.validation.y.tolist() == [7, 8] and split.test.y.tolist() == [0, 1, 2]
    assert split.train.x.dtype == torch.float32 and split.train.y.dtype == torch.int64
    with pytest.raises(TypeError, match=r"^mnist: num_validation must be an integer, got 0.5$"):
        data.mnist(mnist_files, num_validation=0.5)
    with pytest.raises(ValueError, match=r"^mnist: num_validation must lie in \[0, 9\), got 9$"):
        data.mnist(mnist_files, num_validation=9)
    assert [len(part.y) for part in data.mnist(mnist_files, num_validation=0)] == [9, 0, 3]
    assert [len(part.y) for part in data.mnist(mnist_files)] == [8, 1, 3]  # a sixth
    (mnist_files / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(0, 4, 5)))
    (mnist_files / "train-labels-idx1-ubyte").write_bytes(idx(0))
    with pytest.raises(ValueError, match="^mnist: root must hold images to train on, got none$"):
        data.mnist(mnist_files)


def test_mnist_in_the_folder_of_torchvision(mnist_files):
    flat = data.mnist(mnist_files, num_validation=2)
    (mnist_files / "MNIST" / "raw").mkdir(parents=True)
    for path in mnist_files.glob("*ubyte*"):
        path.rename(mnist_files / "MNIST" / "raw" / path.name)
    raw = data.mnist(str(mnist_files / "MNIST"), num_validation=2)
    assert all(
        torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(flat, raw, strict=True)
    )


def test_a_missing_file_is_named_with_its_source(mnist_files):
    (mnist_files / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError) as caught:
        data.mnist(mnist_files, num_validation=2)
    assert str(caught.value) == (
        "mnist: root must hold t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz (to be had from "
        "https://ossci-datasets.s3.amazonaws.com/mnist/, or torchvision's MNIST/raw; Fashion-MNIST: "
        f"https://github.com/zalandoresearch/fashion-mnist, data/fashion), got {mnist_files}"
    )


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a", b"", "be an idx file of unsigned bytes, got an empty one"),
        ("a", idx(3, code=0x0D), "be an idx file of unsigned bytes, got 00000d01"),
        ("a", idx(2, 3)[:7], "be an idx file of unsigned bytes, got 00000802"),
        ("a", idx(2, 3)[:-1], "have 6 bytes after its header, got 5"),
        ("a", idx(2, 3) + b"x", "have 6 bytes after its header, got 7"),
        ("a", idx(*[1] * 33), "have at most 32 dimensions, got 33"),
        ("a.gz", gzip.compress(idx(2, 3), mtime=0)[:-9], "be a whole gzip file, got "),
        ("a.gz", idx(2, 3), "be a whole gzip file, got "),
        ("a.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, "be a whole gzip file, got "),
    ],
)
def test_damaged_idx_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        data.read_idx(path)
    assert str(caught.value).startswith(f"read_idx: {path} must {message}")


def test_an_idx_file_by_its_name(tmp_path):
    (tmp_path / "a").write_bytes(idx(2, 3))
    assert data.read_idx(str(tmp_path / "a")).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError) as caught:
        data.read_idx(str(tmp_path / "b"))
    assert str(caught.value).startswith("read_idx: path must be an idx file (MNIST's: https://")
    assert str(caught.value).endswith(f"got {tmp_path / 'b'}, a missing file")


def test_images_must_have_pixels(mnist_files):
    path = mnist_files / "t10k-images-idx3-ubyte"
    path.write_bytes(idx(3, 0, 5))
    with pytest.raises(ValueError) as caught:
        data.mnist(mnist_files, num_validation=2)
    assert str(caught.value) == f"mnist: {path} must hold images, got values of shape [3, 0, 5]"


def test_labels_must_be_as_many_as_images(mnist_files):
    path = mnist_files / "train-labels-idx1-ubyte"
    path.write_bytes(idx(8))
    with pytest.raises(ValueError) as caught:
        data.mnist(mnist_files)
    assert str(caught.value) == f"mnist: {path} must hold 9 labels, got [8]"


def test_test_images_must_be_as_large_as_those_of_the_training(mnist_files):
    (mnist_files / "t10k-images-idx3-ubyte").write_bytes(idx(3, 2, 5))
    with pytest.raises(ValueError) as caught:
        data.mnist(mnist_files, num_validation=2)
    message = "mnist: root must hold test images of 20 pixels, as the others, got 10"
    assert str(caught.value) == message
