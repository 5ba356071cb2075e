"""MNIST, Fashion-MNIST and what else lies in four idx files."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..ops.checks import AnyPath, refuse
from .parts import Part, Split, as_path, check_file, hold_out

SOURCE = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/, or torchvision's MNIST/raw; Fashion-MNIST: "
    "https://github.com/zalandoresearch/fashion-mnist, data/fashion"
)


def mnist(root: AnyPath, *, num_validation: int | None = None) -> Split:
    """MNIST, or a data set in the same four idx files (Fashion-MNIST), plain or gzipped.

    Args:
        root: folder of train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each with or without .gz; or torchvision's folder MNIST or
            FashionMNIST, which has them in raw.
        num_validation: the last rows of the training files, which become the validation part; may
            be 0; by default 10,000, or a sixth where that is less.

    Returns:
        Split; x (N, pixels) float32 in [0, 1], y (N,) int64.

    Raises:
        ValueError: a file is missing or damaged, or has images without pixels, or no training rows
            would be left.
    """
    root = as_path("mnist", "root", root)
    train, test = (Part(*_images_and_labels(root, part)) for part in ("train", "t10k"))
    if train.x.shape[1:] != test.x.shape[1:]:
        requirement = f"hold test images of {train.x.shape[1]} pixels, as the others"
        refuse("mnist", "root", requirement, test.x.shape[1])
    if num_validation is None:
        num_validation = min(10_000, len(train.x) // 6)
    return hold_out("mnist", train, num_validation, test)


def _images_and_labels(root: Path, part: str) -> tuple[Tensor, Tensor]:
    path = _find(root, f"{part}-images-idx3-ubyte")
    images = read_idx(path)
    if images.dim() < 2 or 0 in images.shape[1:]:
        refuse("mnist", str(path), "hold images", f"values of shape {list(images.shape)}")
    path = _find(root, f"{part}-labels-idx1-ubyte")
    labels = read_idx(path)
    if labels.shape != images.shape[:1]:
        refuse("mnist", str(path), f"hold {len(images)} labels", list(labels.shape))
    return images.flatten(1).float() / 255, labels.long()


def _find(root: Path, name: str) -> Path:
    for folder in (root, root / "raw"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    requirement = f"hold {name} or {name}.gz (to be had from {SOURCE})"
    refuse("mnist", "root", requirement, str(root))


def read_idx(path: AnyPath) -> Tensor:
    """The unsigned bytes of an idx file, gzipped where its name ends in .gz,
    in the shape of its header.

    Args:
        path: of the file.

    Returns:
        uint8, in the shape of the header: (N, 28, 28) of MNIST's images, (N,) of its labels.

    Raises:
        ValueError: the file is missing or damaged, or holds something else.
    """
    path = as_path("read_idx", "path", path)
    check_file("read_idx", path, f"be an idx file (MNIST's: {SOURCE})")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        refuse("read_idx", str(path), "be a whole gzip file", error)
    # Two zeros, 8 for unsigned bytes, the number of dimensions, each size as a big-endian uint32.
    start = 4 + 4 * content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else math.inf
    if start > len(content):
        got = content[:4].hex() or "an empty one"
        refuse("read_idx", str(path), "be an idx file of unsigned bytes", got)
    if content[3] > 32:  # NumPy's limit, before version 2
        refuse("read_idx", str(path), "have at most 32 dimensions", content[3])
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if math.prod(shape) != len(content) - start:
        requirement = f"have {math.prod(shape)} bytes after its header"
        refuse("read_idx", str(path), requirement, len(content) - start)
    values = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())
