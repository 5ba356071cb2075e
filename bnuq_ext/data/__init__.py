"""Data sets that lie on this machine, read whole into memory; nothing is downloaded,
nothing unpickled.

A missing file is a ValueError that names the file and where it is to be had.
"""

from .array_files import arrays, table
from .idx import mnist, read_idx
from .images import CAMVID, CIFAR, camvid, cifar10, image_folder
from .parts import Part, Split, add_noise
from .scikit import diabetes, digits

__all__ = [
    "CAMVID",
    "CIFAR",
    "Part",
    "Split",
    "add_noise",
    "arrays",
    "camvid",
    "cifar10",
    "diabetes",
    "digits",
    "image_folder",
    "mnist",
    "read_idx",
    "table",
]
