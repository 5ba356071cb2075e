"""Arrays as the files of a data set hold them."""

import io
import lzma
import struct

import numpy as np


def packed(value):
    """The bytes of a .npy.xz file."""
    file = io.BytesIO()
    np.save(file, value)
    return lzma.compress(file.getvalue())


def idx(values):
    """The bytes of a file of MNIST's format."""
    values = np.asarray(values)
    header = struct.pack(f">{values.ndim + 1}I", 0x0800 | values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()
