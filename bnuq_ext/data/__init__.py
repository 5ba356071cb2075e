"""Data sets that lie on this machine, read whole into memory; nothing is downloaded,
nothing unpickled.

A missing file is a ValueError that names the file and where it is to be had.
"""

from .array_files import arrays as arrays
from .array_files import table as table
from .idx import mnist as mnist
from .idx import read_idx as read_idx
from .images import CAMVID as CAMVID
from .images import CIFAR as CIFAR
from .images import camvid as camvid
from .images import cifar10 as cifar10
from .images import image_folder as image_folder
from .parts import Part as Part
from .parts import Split as Split
from .parts import add_noise as add_noise
from .scikit import diabetes as diabetes
from .scikit import digits as digits
