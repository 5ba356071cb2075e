"""Kernels that a test writes as PTX, run by the interpreter."""

import ctypes
import functools
import itertools

import numpy as np
from hostrun import build

NUMBER = itertools.count()
HEADER = """.version 9.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 all_of_it[];
.visible .entry {name}(
.param .u64 {name}_param_0
)
.maxntid 256, 1, 1
{{
.reg .pred %p<9>;
.reg .f32 %f<9>;
.reg .b32 %r<30>;
.reg .b64 %rd<9>;
.reg .f64 %fd<9>;
ld.param.u64 %rd1, [{name}_param_0];
cvta.to.global.u64 %rd1, %rd1;
mov.u32 %r1, %tid.x;
"""


@functools.cache
def load_library():
    library = ctypes.CDLL(build.build("ptx"))
    library.hostrun_load_ptx.restype = library.hostrun_run_ptx.restype = ctypes.c_char_p
    size, word = ctypes.c_size_t, ctypes.c_uint
    library.hostrun_run_ptx.argtypes = [
        ctypes.c_char_p, word, word, size, ctypes.c_void_p, ctypes.c_uint64
    ]  # fmt: skip
    library.hostrun_set_approximation.argtypes = [ctypes.c_double]
    library.hostrun_set_tensor.argtypes = [ctypes.c_uint64, size, ctypes.c_bool]
    return library


def run_statements(folder, body, data, threads=32, shared=0, seed=0, bounds=(0, False)):
    """The array of 32-bit words after statements; %rd1 is its address, %r1 the thread.

    With `bounds`, bytes of the array from its start and whether they may be written,
    nothing else may be touched.
    """
    library, name = load_library(), f"kernel{next(NUMBER)}"
    path = folder / f"{name}.ptx"
    path.write_text(HEADER.format(name=name) + body + "\nret;\n}\n")
    error = library.hostrun_load_ptx(str(path).encode())
    if not error:
        data = np.array(data).view(np.uint32).ravel()
        pointer = data.ctypes.data
        library.hostrun_set_tensor(pointer, *bounds)
        error = library.hostrun_run_ptx(name.encode(), 1, threads, shared, pointer, seed)
    if error:
        raise RuntimeError(error.decode())
    return data
