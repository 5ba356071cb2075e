"""The interpreter of PTX notices every kind of broken kernel."""

import functools

import numpy as np
import pytest
from hostrun import build
from hostrun.kernels import HEADER, load_library, run_statements

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_statements, tmp_path)


BROKEN = {
    "unknown instruction warp.drive": "warp.drive %r1, %r2;",
    "no label \\$nowhere": "bra $nowhere;",
    "label \\$here for the second time": "$here:\n$here:",
    "unknown register %clock": "mov.u32 %r2, %clock;",
    "add.s32 has 3 operands, not 2": "add.s32 %r2, %r1;",
    "setp.eq.s32 has 3 operands, not 4": "setp.eq.s32 %p1|%p2, %r1, 0;",
    "too many operands": "add.s32 " + ", ".join(["%r1"] * 15) + ";",
    "an offset of other than the last address": "cp.async.cg.shared.global [%r1+16], [%rd1], 16, 16;",
    "a division by zero": "div.s32 %r2, %r1, 0;",
    "unknown name nothing": "mov.u32 %r2, nothing;",
    "only barrier 0": "bar.sync 1;",
    "not aligned to 8": "ld.global.u64 %rd5, [%rd1+4];",
    "outside of 64 bytes": "st.shared.u32 [all_of_it+64], %r1;",
    "4294967292 is outside of": "st.shared.u32 [all_of_it+-4], %r1;",
    "outside of 8 bytes": "ld.param.u64 %rd5, [%r1+8];",
    "a warp diverged before a shuffle": """
        setp.eq.s32 %p1, %r1, 3;
        @%p1 bra $on;
        shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, -1;
    $on:""",
    "a warp diverged before a collective": """
        setp.eq.s32 %p1, %r1, 3;
        @%p1 bra $on;
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
    $on:""",
    "a barrier that some lanes of a warp never reach": """
        setp.eq.s32 %p1, %r1, 3;
        @%p1 bra $on;
        bar.sync 0;
    $on:""",
    "a barrier diverged": """
        setp.eq.s32 %p1, %r1, 3;
        @%p1 bra $other;
        bar.sync 0;
        bra $on;
    $other:
        bar.sync 0;
    $on:""",
    "a barrier under a predicate": """
        setp.eq.s32 %p1, %r1, 3;
        @%p1 bar.sync 0;""",
    "a shuffle reads a lane that is not there": """
        setp.lt.s32 %p1, %r1, 16;
        @!%p1 bra $on;
        shfl.sync.idx.b32 %r2|%p2, %r1, 20, 31, 0xffff;
        bra $on;
    $on:""",
    "a copy that it has not waited for": """
        mov.u32 %r2, all_of_it;
        cp.async.cg.shared.global [%r2], [%rd1], 16, 16;""",
    "a copy of other than": """
        mov.u32 %r2, all_of_it;
        cp.async.cg.shared.global [%r2], [%rd1], 16, 8;""",
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_kernel_is_noticed(run, message):
    with pytest.raises(RuntimeError, match=message):
        run(BROKEN[message], np.zeros((32, 4), np.uint32), shared=64)


def test_a_barrier_that_some_warps_never_reach(run):
    with pytest.raises(RuntimeError, match="a barrier that some warps never reach"):
        run("setp.lt.s32 %p1, %r1, 32;\n@%p1 bra $on;\nbar.sync 0;\n$on:", [0], threads=64)


def test_a_kernel_that_does_not_end(tmp_path):
    path = tmp_path / "cut.ptx"
    path.write_text(HEADER.format(name="cut"))
    assert b"cut does not end" in load_library().hostrun_load_ptx(str(path).encode())


def test_launches_that_a_gpu_refuses(run):
    run("", [0], threads=256, shared=49152)
    with pytest.raises(RuntimeError, match="288 threads are more than its __launch_bounds__"):
        run("", [0], threads=288)
    with pytest.raises(RuntimeError, match="49168 bytes of shared memory"):
        run("", [0], shared=49168)


@pytest.mark.parametrize(
    "access, bounds, what",
    [
        ("ld.global.u32 %r2, [%rd1+12];", (16, False), None),
        ("ld.global.v2.u32 {%r2, %r3}, [%rd1+8];", (12, True), "read 8"),
        ("ld.global.u32 %r2, [%rd1+-4];", (16, False), "read 4"),
        ("ld.global.nc.u16 %r2, [%rd1+14];", (15, False), "read 2"),
        ("st.global.u32 [%rd1+12], %r1;", (16, True), None),
        ("st.global.u32 [%rd1+12], %r1;", (16, False), "write 4"),
        ("st.global.u32 [%rd1+12], %r1;", (12, True), "write 4"),
        ("@%p1 st.global.u32 [%rd1+12], %r1;", (12, True), None),
        ("cp.async.cg.shared.global [%r2], [%rd1], 16, 16;", (12, False), "read 16"),
        ("cp.async.cg.shared.global [%r2], [%rd1], 16, 0;", (12, False), None),
    ],
)
def test_accesses_outside_of_tensors(run, access, bounds, what):
    body = f"mov.u32 %r2, all_of_it;\nsetp.lt.s32 %p1, %r1, 0;\n{access}\ncp.async.wait_all;"
    data = np.zeros(64, np.uint32)  # 16-byte aligned, as numpy's large arrays are
    if what is None:
        run(body, data, shared=64, bounds=bounds)
        return
    verb, count = what.split()
    message = f"line .*: {verb}s {count} bytes outside of the tensors that it may {verb}"
    with pytest.raises(RuntimeError, match=message):
        run(body, data, shared=64, bounds=bounds)
