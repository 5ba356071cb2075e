"""What the kernels' accesses touch: sectors of global memory, turns at the banks of shared memory.

A request, of a warp by one instruction, may touch little more than its bytes fill.
See hostrun/accesses.cpp.
"""

import ctypes
import itertools
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hostrun import build, calls, sanitized_bayes, sanitized_case
from hostrun.calls import Kernels
from hostrun.sanitized_case import random_bits

ADDR2LINE = shutil.which("addr2line")
pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}"),
    pytest.mark.skipif(
        ADDR2LINE is None, reason="no addr2line: places in the source are not found"
    ),
]

SEED = np.array([7, 2])
MOST = 1.15  # times the least
SOURCES = {}  # that were found

# Lines that touch more: how much of it, and why that is left.
HALVES = 2.0  # the other half of a sector is what the next instruction of the thread asks for
SPLIT = 4.0  # on a GPU one instruction, of 16 bytes
SMALL = 8.0  # of a few numbers, next to what its kernel or the one before it moves
EXPECTED = {
    "unpack(load_stream<4>(from + 4 * h), z[h])": HALVES,
    "unpack(load_again<kEach>(run + at + e), part)": HALVES,
    "*reinterpret_cast<uint32_t*>(to + ": HALVES,
    "b[2] = {__ldg(columns)": HALVES,
    "sums[at] = own": HALVES,
    "grad[k] = p.grad_x[at]": HALVES,
    "p.grad_x[at] = grad[k]": HALVES,
    "mean[slot] = p.mu[k]": HALVES,
    "sigma[slot] = rho[k]": HALVES,
    "p.grad_mu[k] = ": HALVES,
    "p.grad_rho[k] = ": HALVES,
    "row[k % 2 + k / 2 * 8] = acc[0][n][k]": HALVES,
    "mu[slot] = p.mu[k]": HALVES,
    "rho[slot] = p.rho[k]": HALVES,
    "grad_mu[k] = by_terms * by_mu[slot]": HALVES,
    "grad_rho[k] = by_terms * by_rho[slot]": HALVES,
    "replica[k] = z[slot]": HALVES,
    "m.to[i] = {": SPLIT,
    "part[u] = from[": SMALL,
    "out[t * C + first + e] = z[e]": SMALL,
    "total += scratch[slot_of(": 2.0,  # a channel of 49 places begins at any bank
    "if (lane == 0) out[k] = total": 1.5,  # ends of the rows of partial sums
    # A tile of few channels has several replicas in a request, whose tables begin at any bank.
    "run[0] = a.mean": 1.5,
    "run[p.slots] = a.scale": 1.5,
    "run[2 * p.slots] = a.bias": 1.5,
}


@dataclass
class Line:
    requests: int = 0
    touched: int = 0
    least: int = 0


def aligned(shape, dtype, offset=0):
    """As the arrays of hostrun.calls, but where torch's would begin: on a sector."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype).reshape(shape)


def placed(array, offset=0):
    if array is None:
        return None
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


@pytest.fixture(scope="module")
def library():
    library = ctypes.CDLL(build.build("accesses"))
    library.finish_accesses.restype = ctypes.c_char_p
    return library


@pytest.fixture
def kernels(monkeypatch):
    for module in (calls, sanitized_bayes):
        monkeypatch.setattr(module, "fresh", aligned)
        monkeypatch.setattr(module, "placed", placed)
    monkeypatch.setattr(calls, "check_guards", lambda array: None)
    return Kernels(build.load("accesses"))


def of_kernel(frames):
    """The line of a kernel's source, past the helpers that all kernels use."""
    own = [frame for frame in frames if re.search(r"/csrc/(?!cuda/device)|probes", frame)] or frames
    path, line = own[0].split(" ")[0].rsplit(":", 1)
    if not line.isdigit():  # newer compilers give some instructions none
        return f"{Path(path).name}: {line}"
    lines = Path(path).read_text().splitlines()
    text = lines[int(line) - 1].strip() if int(line) <= len(lines) else line
    return f"{Path(path).name}: {text}"


def find_sources(known, places):
    """Adds {place in the code: line of a kernel's source} to what is known."""
    missing = [place for place in places if place not in known]
    command = [ADDR2LINE, "-a", "-i", "-e", build.BUILD / "hostrun_accesses.so"]
    text = "\n".join(map(hex, missing))
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    for block in re.split(r"^0x", output, flags=re.MULTILINE)[1:]:
        place, *frames = block.splitlines()
        known[int(place, 16)] = of_kernel(frames)


def counted(library, call):
    """{(source, "reads" or "writes", "global" or "shared"): Line}."""
    library.start_accesses()
    try:
        call()
    finally:
        text = library.finish_accesses().decode()
    rows = [tuple(map(int, row.split())) for row in text.splitlines()]
    find_sources(SOURCES, {row[0] for row in rows})
    lines = defaultdict(Line)
    for place, store, shared, requests, touched, least in rows:
        line = lines[SOURCES[place], ("reads", "writes")[store], ("global", "shared")[shared]]
        line.requests += requests
        line.touched += touched
        line.least += least
    return lines


# ---- what is counted ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, stride, sectors, turns",
    [
        ("strided", 1, (4, 4), (1, 1)),
        ("strided", 8, (32, 4), (8, 1)),
        ("strided", 32, (32, 4), (32, 1)),
        ("strided", 33, (32, 4), (1, 1)),
        ("strided_vectors", 1, (16, 16), (4, 4)),
        ("strided_vectors", 2, (32, 16), (8, 4)),
    ],
)
def test_sectors_and_turns_are_counted(library, kernels, name, stride, sectors, turns):
    x, y = (np.ones(32 * 33 * 4, np.float32) for _ in range(2))
    x, y = placed(x), placed(y)
    block, shared = (32, 1, 1), 32 * 1024
    lines = counted(
        library,
        lambda: kernels.module.probe(name, x, y, stride, block=block, shared_bytes=shared),
    )
    for (text, _, space), line in lines.items():
        expected = sectors if space == "global" else turns
        assert (line.requests, line.touched, line.least) == (1, *expected), text
    assert {key[1:] for key in lines} >= {("reads", "global"), ("writes", "shared")}


def test_asynchronous_copies_and_matrices_are_counted(library, kernels):
    x, y = placed(np.ones(1024, np.float32)), aligned((1024,), np.float32)

    def of(name, threads):
        call = counted(library, lambda: kernels.module.probe(name, x, y, 0, block=(threads, 1, 1)))
        return {key: line for key, line in call.items() if "begin_copy" in key[0] or "load_m" in key[0]}  # fmt: skip

    copies = {key[1:]: (line.requests, line.touched) for key, line in of("staged", 64).items()}
    assert copies == {("reads", "global"): (4, 32), ("writes", "shared"): (4, 16)}
    matrices = {key[1:]: (line.requests, line.touched) for key, line in of("matrices", 32).items()}
    assert matrices == {("reads", "shared"): (1, 4)}


# ---- the kernels -------------------------------------------------------------------------------


def batch_norm(kernels, random):
    shapes = {
        "bfloat16": [(2, 32, 1024), (2, 128, 196), (1, 512, 49), (128, 64, 1), (64, 256, 1)],
        "float32": [(2, 128, 196), (128, 64, 1)],
    }
    for dtype in shapes:
        for args in itertools.product(shapes[dtype], (True, False)):
            yield partial(sanitized_case.run_batch_norm, kernels, random, dtype, *args)


def predictive(kernels, random):
    # Rows of ten classes, of which a few lanes take every second or fourth, touch up to 5 times it;
    # more than 256 classes of a position among others, each in a sector of its own, 8 or 16 times.
    shapes = [(2, 4, 1024, 1), (2, 2, 21, 256), (2, 1, 8, 512), (2, 1, 4608, 1)]
    for args in itertools.product(("float32", "bfloat16"), shapes):
        yield partial(sanitized_case.run_predictive, kernels, random, *args)


def products(kernels, random):
    shapes = [(1, 80, 784), (8, 64, 256), (32, 64, 128), (128, 64, 64)]
    for args in itertools.product(shapes, (True, False)):
        yield partial(sanitized_bayes.run_products, kernels, random_bits, random, "float16", *args)


def direct(kernels, random):
    for args in itertools.product([(1, 80, 784), (8, 64, 256)], (True, False)):
        yield partial(sanitized_bayes.run_direct, kernels, random, "float32", *args)


def weights(kernels, random):
    yield partial(sanitized_bayes.run_divergences, kernels, random, "float32", (0, 80, 784))
    for shape in ((20, 512), (2, 80, 784)):
        yield partial(kernels.philox_normal, SEED, 1, shape, 0)
    yield partial(kernels.snapshot_indices, SEED, 5, 320)


def test_accesses_touch_what_they_need(library, kernels):
    random, met = np.random.default_rng(0), set()
    runs = (make(kernels, random) for make in (batch_norm, predictive, products, direct, weights))
    for run in itertools.chain.from_iterable(runs):
        lines = counted(library, run)
        assert lines
        for key, line in lines.items():
            parts = [part for part in EXPECTED if part in key[0]]
            most = max((EXPECTED[part] for part in parts), default=MOST)
            known = not key[0].endswith(": ?")
            assert line.touched <= most * line.least or not known, (run, key, line)
            met.update(parts if line.touched > MOST * line.least else [])
    assert met == set(EXPECTED)
