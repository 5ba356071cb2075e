"""The interpreter of PTX: each instruction that asks for more than C++ has."""

import functools

import numpy as np
import pytest
from hostrun import build
from hostrun.kernels import load_library, run_statements

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

LANE = np.arange(32, dtype=np.uint32)


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_statements, tmp_path)


def each(*statements, words=3):
    """%r10, %r11, ... are the thread's words, and %r10 becomes the first."""
    lines = [f"mad.lo.s32 %r2, %r1, {4 * words}, 0;", "cvt.u64.u32 %rd2, %r2;"]
    lines += ["add.s64 %rd3, %rd1, %rd2;"]
    lines += [f"ld.global.u32 %r{10 + i}, [%rd3+{4 * i}];" for i in range(words)]
    return "\n".join([*lines, *statements, "st.global.u32 [%rd3], %r10;"])


def words_of(rows):
    return np.array(rows, np.float32).view(np.uint32)


@pytest.mark.parametrize(
    "statement, words, expected",
    [
        ("prmt.b32 %r10, %r10, %r11, 0x7214;", [0x03020100, 0x07060504], 0x07020104),
        ("prmt.b32 %r10, %r10, %r11, 0x888b;", [0x830201FF, 0], 0xFFFFFFFF),
        ("prmt.b32 %r10, %r10, %r11, 0x8889;", [0x8302017F, 0], 0x00000000),
        ("lop3.b32 %r10, %r10, %r11, %r12, 0x96;", [12, 10, 7], 12 ^ 10 ^ 7),
        ("lop3.b32 %r10, %r10, %r11, %r12, 0xea;", [12, 10, 1], 12 & 10 | 1),
        ("lop3.b32 %r10, %r10, %r11, %r12, 0xca;", [12, 10, 7], 12 & 10 | ~12 & 7),
        ("bfi.b32 %r10, %r10, %r11, 8, 16;", [0xABCDEF, 0x11111111], 0x11CDEF11),
        ("shl.b32 %r10, %r10, 32;", [5], 0),
        ("shr.s32 %r10, %r10, 40;", [0x80000000], 0xFFFFFFFF),
        ("shr.u32 %r10, %r10, 40;", [0x80000000], 0),
        ("min.s32 %r10, %r10, %r11;", [0xFFFFFFFF, 1], 0xFFFFFFFF),
        ("max.u32 %r10, %r10, %r11;", [0xFFFFFFFF, 1], 0xFFFFFFFF),
        ("div.s32 %r10, %r10, %r11;", [0xFFFFFFF9, 2], 0xFFFFFFFD),
        ("rem.s32 %r10, %r10, %r11;", [0xFFFFFFF9, 2], 0xFFFFFFFF),
        ("cvt.rn.f16x2.f32 %r10, %r10, %r11;", words_of([1, 2]), 0x3C004000),
        ("cvt.rn.bf16x2.f32 %r10, %r10, %r11;", words_of([1, 2]), 0x3F804000),
        ("mul.rn.f16x2 %r10, %r10, %r11;", [0x3C014000, 0x3C014200], 0x3C024600),
        ("fma.rn.bf16x2 %r10, %r10, %r11, %r12;", [0x3F814000, 0x3F814040, 0x80008000], 0x3F8240C0),
        ("fma.rm.f32 %r10, %r10, %r11, %r12;", words_of([1, 1, 2.0**-40]), 0x3F800000),
        ("fma.rm.f32 %r10, %r10, %r11, %r12;", words_of([1, 1, -(2.0**-40)]), 0x3F7FFFFF),
        ("add.rz.f32 %r10, %r10, %r11;", words_of([-1, 2.0**-40]), 0xBF7FFFFF),
        ("max.f32 %r10, %r10, %r11;", words_of([np.nan, 1]), 0x3F800000),
        ("max.f32 %r10, %r10, %r11;", words_of([-0.0, 0]), 0),
        ("min.f32 %r10, %r10, %r11;", words_of([0, -0.0]), 0x80000000),
        ("sub.f32 %r10, %r10, %r10;", words_of([np.inf]), 0x7FFFFFFF),
        ("max.NaN.f32 %r10, %r10, %r11;", words_of([1, np.nan]), 0x7FFFFFFF),
        ("cvt.sat.f32.f32 %r10, %r10;", words_of([-3]), 0),
        ("cvt.sat.f32.f32 %r10, %r10;", words_of([np.nan]), 0),
        ("ex2.approx.ftz.f32 %r10, %r10;", words_of([-126.5]), 0),
        ("ex2.approx.ftz.f32 %r10, %r10;", words_of([3]), 0x41000000),
        ("rsqrt.approx.f32 %r10, %r10;", words_of([4]), 0x3F000000),
    ],
)
def test_one_instruction(run, statement, words, expected):
    rows = np.zeros((32, 3), np.uint32)
    rows[:, : len(words)] = words
    assert (run(each(statement), rows).reshape(32, 3)[:, 0] == expected).all()


def test_comparisons(run):
    """As the ISA has them: of a NaN a name that ends in u is true, and any other false."""
    holds = {
        "eq": (0, 0, 1), "ne": (1, 1, 0), "lt": (1, 0, 0), "le": (1, 0, 1), "gt": (0, 1, 0), "ge": (0, 1, 1),
    }  # fmt: skip
    names = [*holds, *(f"{name}u" for name in holds), "num", "nan"]
    holds |= {f"{name}u": row for name, row in holds.items()} | {"num": (1, 1, 1), "nan": (0, 0, 0)}
    lines = ["mov.b32 %f1, %r10;", "mov.b32 %f2, %r11;", "mov.u32 %r20, 0;"]
    for i, name in enumerate(names):
        lines += [f"setp.{name}.f32 %p1, %f1, %f2;", f"@%p1 add.s32 %r20, %r20, {1 << i};"]
    rows = np.zeros((32, 3), np.uint32)
    for lane, pair in enumerate([(1, 2), (2, 1), (1, 1), (np.nan, 1), (1, np.nan)]):
        rows[lane, :2] = words_of(pair)
    seen = run(each(*lines, "mov.u32 %r10, %r20;"), rows).reshape(32, 3)[:, 0]
    for lane in range(3):
        assert seen[lane] == sum(1 << i for i, name in enumerate(names) if holds[name][lane])
    of_nan = sum(1 << i for i, name in enumerate(names) if name.endswith("u") or name == "nan")
    assert seen[3] == seen[4] == of_nan


def test_wide_numbers_and_vectors(run):
    """A float64 from two words, a signed byte, accesses of two words."""
    body = """
    mov.u32 %r2, %tid.x;
    mul.wide.s32 %rd2, %r2, 8;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.v2.u32 {%r3, %r4}, [%rd3];
    mov.b64 %fd1, {%r3, %r4};
    fma.rn.f64 %fd2, %fd1, %fd1, 0d3FF0000000000000;
    mov.b64 {%r5, %r6}, %fd2;
    ld.global.s8 %r7, [%rd3+7];
    cvt.s64.s32 %rd4, %r7;
    cvt.u32.u64 %r8, %rd4;
    add.s32 %r6, %r6, %r8;
    sub.s32 %r6, %r6, %r8;
    st.global.v2.u32 [%rd3], {%r5, %r6};"""
    x = np.random.default_rng(4).standard_normal(32)
    made = run(body, x).view(np.float64)
    np.testing.assert_allclose(made, x * x + 1, rtol=1e-15)


def test_the_ways_of_a_warp_meet_again(run):
    """Lanes turn a loop as often as their number says, then read their neighbour's count."""
    body = """
    mov.u32 %r20, 0;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra $done;
$again:
    add.s32 %r20, %r20, 3;
    setp.lt.s32 %p2, %r20, %r10;
    @%p2 bra $again;
$done:
    shfl.sync.bfly.b32 %r21|%p3, %r20, 1, 31, -1;
    mov.u32 %r10, %r21;"""
    rows = np.zeros((32, 3), np.uint32)
    rows[:, 0] = 3 * LANE
    assert (run(each(body), rows).reshape(32, 3)[:, 0] == 3 * (LANE ^ 1)).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shared_memory_across_a_barrier(run, seed):
    body = """
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    mov.u32 %r4, all_of_it;
    add.s32 %r5, %r4, %r2;
    st.shared.u32 [%r5], %r3;
    bar.sync 0;
    sub.s32 %r6, 316, %r2;
    add.s32 %r7, %r4, %r6;
    ld.shared.u32 %r8, [%r7];
    st.global.u32 [%rd3], %r8;"""
    data = np.arange(80, dtype=np.uint32)
    assert (run(body, data, threads=80, shared=320, seed=seed) == data[::-1]).all()


@pytest.mark.parametrize(
    "shuffle, source",
    [
        ("idx.b32 %r10|%p1, %r10, 5, 0x181f, -1", LANE // 8 * 8 + 5),  # segments of 8
        ("bfly.b32 %r10|%p1, %r10, 3, 0x1c1f, -1", LANE ^ 3),  # of 4
        ("bfly.b32 %r10|%p1, %r10, 1, 0x0006, -1", np.where((LANE ^ 1) <= 6, LANE ^ 1, LANE)),
    ],
)
def test_shuffles(run, shuffle, source):
    """Beyond the last lane of a segment there is nothing to read, and the predicate says so."""
    there = "selp.b32 %r11, 1, 0, %p1;\nst.global.u32 [%rd3+4], %r11;"
    rows = np.zeros((32, 3), np.uint32)
    rows[:, 0] = LANE + 100
    made = run(each(f"shfl.sync.{shuffle};", there), rows).reshape(32, 3)
    beyond = "0x0006" in shuffle
    assert (made[:, 0] == source + 100).all()
    assert (made[:, 1] == ((LANE ^ 1) <= 6 if beyond else 1)).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_product(run, kind):
    """Fragments are filled by the ISA's formulas, written down once more here."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    c = rng.standard_normal((16, 8)).astype(np.float32)

    def bits(v):
        wide = np.array(v, np.float32)
        return (
            np.float16(wide).view(np.uint16) if kind == "f16" else wide.view(np.uint32) >> 16
        ).astype(np.uint32)

    rows = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(4):
            row, column = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
            low, high = bits(a[row, column]), bits(a[row, column + 1])
            rows[lane, i] = low | high << 16
        for i in range(2):
            rows[lane, 4 + i] = bits(b[2 * t + 8 * i, g]) | bits(b[2 * t + 8 * i + 1, g]) << 16
        for i in range(4):
            rows[lane, 6 + i] = c[g + 8 * (i // 2), 2 * t + i % 2].view(np.uint32)
    product = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r10,%r11,%r12,%r13}}, "
        "{%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19};"
    )
    stores = [f"st.global.u32 [%rd3+{4 * i}], %r{10 + i};" for i in range(4)]
    made = run(each(product, *stores, words=10), rows).reshape(32, 10)[:, :4]
    expected = (a @ b + c.astype(np.float64)).astype(np.float32)
    for lane in range(32):
        for i in range(4):
            place = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            assert made[lane, i] == expected[place].view(np.uint32)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_shared_memory(run, transposed):
    """Copied there asynchronously, the last eight lanes' bytes as zeros;
    then one of them turned once more."""
    body = f"""
    shl.b32 %r2, %r1, 4;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r4, all_of_it;
    add.s32 %r5, %r4, %r2;
    setp.lt.u32 %p1, %r1, 24;
    selp.b32 %r6, 16, 0, %p1;
    cp.async.cg.shared.global [%r5], [%rd3], 16, %r6;
    cp.async.wait_all;
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.{"trans." if transposed else ""}shared.b16 {{%r10,%r11,%r12,%r13}}, [%r5];
    movmatrix.sync.aligned.m8n8.trans.b16 %r11, %r11;
    st.global.v4.u32 [%rd3], {{%r10,%r11,%r12,%r13}};"""
    numbers = np.random.default_rng(2).integers(0, 1 << 16, (4, 8, 8), np.uint16)
    made = run(body, numbers, shared=512).view(np.uint16).reshape(32, 4, 2).transpose(1, 0, 2)
    expected = numbers.copy()
    expected[3] = 0
    if transposed:
        expected = expected.transpose(0, 2, 1)
    expected = [m.T if i == 1 else m for i, m in enumerate(expected)]
    assert (made.reshape(4, 8, 8) == expected).all()


def test_a_copy_is_not_there_before_it_is_waited_for(run):
    body = """
    mov.u32 %r2, all_of_it;
    cp.async.cg.shared.global [%r2], [%rd1], 16, 16;
    ld.shared.u32 %r3, [%r2];
    cp.async.wait_all;
    ld.shared.u32 %r4, [%r2];
    st.global.v2.u32 [%rd1], {%r3, %r4};"""
    made = run(body, np.full(4, 7, np.uint32), threads=1, shared=16)
    assert made[:2].tolist() == [0xFFFFFFFF, 7]


@pytest.mark.parametrize(
    "name, exact, error",
    [
        ("lg2.approx.ftz", np.log2, 2.0**-22),
        ("ex2.approx.ftz", np.exp2, 2.0**-22),
        ("sin.approx", np.sin, 2.0**-20.5),
        ("cos.approx", np.cos, 2.0**-20.5),
    ],
)
def test_approximate_instructions_err_as_far_as_they_may(run, name, exact, error):
    x = np.random.default_rng(3).uniform(0.55, 1, (32, 3)).astype(np.float32)
    try:
        load_library().hostrun_set_approximation(1)
        made = run(each(f"{name}.f32 %r10, %r10;"), x).view(np.float32).reshape(32, 3)
    finally:
        load_library().hostrun_set_approximation(0)
    wanted = exact(x[:, 0].astype(np.float64))
    scale = wanted if name.startswith("ex2") else 1
    off = np.abs(made[:, 0] - wanted) / scale
    assert 0.7 * error < off.max() < error + 2.0**-24
