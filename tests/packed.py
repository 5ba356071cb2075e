"""Arrays as the files of a data set hold them."""

import io
import lzma

import numpy as np


def packed(value):
    """The bytes of a .npy.xz file."""
    file = io.BytesIO()
    np.save(file, value)
    return lzma.compress(file.getvalue())
