"""The ops: one Python function each, over kernels for CPU and CUDA."""

from .philox import new_seed as new_seed
from .philox import philox_normal as philox_normal
from .philox import snapshot_indices as snapshot_indices
