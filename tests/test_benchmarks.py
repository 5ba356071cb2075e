"""The yardsticks give the answer that they are timed for, and the report says what was measured."""

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench_batch_norm, models, report, timing, yardsticks
from benchmarks.memory import peak_extra_bytes
from bnuq_ext import reference

ROOT = Path(__file__).parent.parent
NETWORKS = {
    "mlp": (lambda: models.mlp(12, 8, 3, 5), (4, 12)),
    "resnet18": (lambda: models.resnet18(num_classes=5, width=4), (3, 3, 16, 16)),
    "resnet50": (lambda: models.resnet50(num_classes=5, width=4), (2, 3, 48, 48)),
}
YARDSTICKS = {
    "loop": yardsticks.loop,
    "vmap": yardsticks.vmapped,
    "vmap in chunks": lambda *args: yardsticks.vmapped(*args, chunk=2),
    "folded weights": yardsticks.folded_into_convolutions,
    "batched affine": yardsticks.batched,
    "compiled loop": yardsticks.compiled_loop,
    "compiled batched": yardsticks.compiled_batched,
}


@pytest.fixture(params=NETWORKS)
def network(request):
    """A small network, tables of five replicas, and an input."""
    build, shape = NETWORKS[request.param]
    torch.manual_seed(0)
    model = models.randomise_batch_norm(build())
    return model, yardsticks.random_tables(model, 5), torch.randn(shape)


def oracle(model, tables, x):
    """In float64: each row of the tables copied into the running buffers, and one eval pass."""
    model, outputs = deepcopy(model).double(), []
    for t in range(5):
        for name, (mean, var) in tables.items():
            layer = model.get_submodule(name)
            layer.running_mean.copy_(mean[t])
            layer.running_var.copy_(var[t])
        outputs.append(model(x.double()))
    return torch.stack(outputs)


# Of torch 2.10's own import.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("name", YARDSTICKS)
@torch.no_grad()
def test_yardsticks_agree_with_an_eval_pass_a_replica(network, name):
    model, tables, x = network
    before = {k: v.clone() for k, v in model.state_dict().items()}
    # Without the compiler: the benchmark itself checks what Inductor makes of it.
    with torch.compiler.set_stance("force_eager"):
        actual = YARDSTICKS[name](model, tables, x)()
    expected = oracle(model, tables, x)
    assert expected.std(0).min() > 1e-4
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_parameters_of_the_resnets_are_those_of_the_paper():
    count = {
        name: sum(p.numel() for p in build().parameters())
        for name, build in [("18", models.resnet18), ("50", models.resnet50)]
    }
    # 11.2 million with ten classes and the CIFAR stem; 25.56 million with a thousand classes.
    assert count == {"18": 11_173_962, "50": 25_557_032}


def test_halving_stages():
    shapes = []
    model = models.resnet50(num_classes=5, width=4).eval()
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape[1:])))
    model(torch.randn(1, 3, 224, 224))
    assert shapes[0] == (16, 56, 56) and shapes[3] == (32, 28, 28)
    assert shapes[7] == (64, 14, 14) and shapes[-1] == (128, 7, 7) and len(shapes) == 16


@torch.no_grad()
def test_a_compiler_that_fails_is_no_yardstick(network, monkeypatch):
    def fail(*args):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    for make in (yardsticks.compiled_loop, yardsticks.compiled_batched):
        with pytest.raises(yardsticks.Unavailable, match="^does not compile: no C\\+\\+ compiler$"):
            make(*network)


def test_folding_refuses_a_batch_norm_that_follows_no_linear_layer():
    model = models.randomise_batch_norm(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)))
    with pytest.raises(yardsticks.Unavailable, match="1 does not follow a convolution"):
        yardsticks.folded_into_convolutions(
            model, yardsticks.random_tables(model, 2), torch.ones(2, 3)
        )


@torch.no_grad()
def test_summary_of_the_yardsticks_is_that_of_the_reference():
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, 5, 4)
    mean, variance, entropy, information = yardsticks.predictive(lambda: logits)()
    expected = reference.predictive_statistics(logits.double())
    assert_close = lambda a, e: torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-6)  # noqa: E731
    assert_close(mean, expected[0])
    assert_close(variance, expected[1])
    assert_close(entropy, expected[2])
    assert_close(information, expected[2] - expected[3])


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('no such operator')", "import no_such_module", ""], ids=repr
)
def test_a_broken_torch_uncertainty_is_no_yardstick(tmp_path, monkeypatch, network, text):
    for name in [n for n in sys.modules if n.split(".")[0] == "torch_uncertainty"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch_uncertainty").mkdir()
    (tmp_path / "torch_uncertainty" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        yardsticks.Unavailable, match="does not load: (Runtime|ModuleNotFound)Error"
    ):
        yardsticks.torch_uncertainty(*network)


AFFINE = """
import torch
from benchmarks import bench_batch_norm, models, yardsticks
from benchmarks.triton_affine import TritonAffine, affine

torch.manual_seed(0)
for shape, layout in [((3, 7), torch.contiguous_format), ((2, 3, 4, 5, 6), torch.channels_last_3d),
                      ((3, 5, 21, 20), torch.contiguous_format), ((3, 64, 6, 6), torch.channels_last)]:
    both = torch.randn(2, 3, *shape)
    scale, shift = torch.rand(3, shape[1]), torch.randn(3, shape[1])
    rows = (3, 1, shape[1]) + (1,) * (len(shape) - 2)
    for shared in (True, False):
        given, added = both[:, :1] if shared else both
        expected = given * scale.view(rows) + shift.view(rows)
        x, residual = (v.flatten(0, 1).contiguous(memory_format=layout) for v in (given, added))
        actual = affine(x, scale, shift, shared)
        torch.testing.assert_close(actual, expected.flatten(0, 1))
        assert actual.stride() == residual.stride()
        fused = affine(x, scale, shift, shared, residual)
        torch.testing.assert_close(fused, (expected + added).relu().flatten(0, 1))
with torch.no_grad():
    model = models.randomise_batch_norm(models.mlp(12, 8, 3, 5))
    tables, x = yardsticks.random_tables(model, 5), torch.randn(4, 12)
    actual = yardsticks.batched(model, tables, x, TritonAffine)()
    torch.testing.assert_close(actual, yardsticks.loop(model, tables, x)())
"""

AFFINE_SM90 = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from benchmarks.triton_affine import affine_kernel

types = {name: "i32" for name in ("size", "x_size", "C", "S")} | {"scale": "*fp32", "shift": "*fp32"}
for dtype in ("*fp32", "*bf16"):
    for fused, int64 in [(False, False), (True, True)]:
        flags = {"FUSED": fused, "INT64": int64, "BLOCK": 2048}
        signature = {n: "constexpr" if n in flags else types.get(n, dtype) for n in affine_kernel.arg_names}
        kernel = compile(ASTSource(affine_kernel, signature, flags), target=GPUTarget("cuda", 90, 32))
        assert len(kernel.asm["cubin"]) > 1000
"""


BAYES = """
import torch
from benchmarks.triton_bayes import bayes_linear

torch.manual_seed(0)
for N, O, I, T, shared in [(1, 17, 33, 2, True), (5, 70, 64, 3, False), (130, 65, 33, 1, False)]:
    x = torch.randn(N, I) if shared else torch.randn(T, N, I)
    mu, bias = torch.randn(O, I), torch.randn(O)
    expected = x.expand(T, N, I) @ mu.t() + bias
    actual = bayes_linear(x, mu, torch.zeros(O, I), bias, T)
    assert (actual - expected).abs().max() < 1e-3 * expected.abs().max()
noise = bayes_linear(torch.eye(32), torch.zeros(64, 32), torch.ones(64, 32), torch.zeros(64), 20)
# 40960 normals: five standard errors of the mean, of the variance and of a correlation.
assert abs(noise.mean()) < 0.025 and abs(noise.var() - 1) < 0.035
assert abs((noise[:-1] * noise[1:]).mean()) < 0.026
"""

BAYES_SM90 = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from benchmarks.triton_bayes import bayes_kernel

pointers = {name: "*fp32" for name in ("x", "mu", "sigma", "bias", "y")}
for rows in (16, 128):
    sizes = {"I": 784, "ROWS": rows, "OUT": 64, "DEPTH": 32}
    signature = {n: "constexpr" if n in sizes else pointers.get(n, "i32") for n in bayes_kernel.arg_names}
    kernel = compile(ASTSource(bayes_kernel, signature, sizes), target=GPUTarget("cuda", 90, 32))
    assert "mma" in kernel.asm["ptx"]
"""
SCRIPTS = {"interpreted": (AFFINE + BAYES, "1"), "for sm_90": (AFFINE_SM90 + BAYES_SM90, "0")}


@pytest.mark.parametrize("script,interpret", SCRIPTS.values(), ids=SCRIPTS)
def test_triton_without_a_gpu(script, interpret, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- memory and the report -----------------------------------------------------------------------


def test_a_triton_that_fails_is_no_yardstick(monkeypatch):
    x, residual, mean, weight, bias, var = bench_batch_norm.make(
        (2, 3, 4, 4), 2, False, False, torch.float32, "cpu"
    )
    tensors = (x, residual, mean, var, weight, bias)  # on a CPU, where it runs nowhere
    runs, skipped = bench_batch_norm.with_triton(x, 0.0, *tensors, shared=False)
    assert runs == {} and skipped["Triton"]
    monkeypatch.setattr(bench_batch_norm, "triton_affine", lambda *given: lambda: x + 1)
    with pytest.raises(AssertionError):  # it runs, and is wrong
        bench_batch_norm.with_triton(x, 0.0, *tensors, shared=False)


def test_peak_memory_counts_what_is_alive_at_once():
    def several():
        a = torch.empty(1000)
        b = a.view(10, 100) + 1
        del a
        return b.add_(torch.zeros(500).sum())

    # a and b, 4000 bytes each, and 12 of the number 1, which an operator makes a tensor of; then b,
    # the 2000 bytes of zeros and the sum's 4.
    assert peak_extra_bytes(several) == 8012
    given = torch.ones(100)
    assert peak_extra_bytes(lambda: given.view(10, 10).t().add_(1)) == 12
    assert peak_extra_bytes(lambda: [torch.ones(100) for _ in range(10)]) == 4000
    assert peak_extra_bytes(lambda: [torch.ones(100).sum() for _ in range(10)]) == 440


def test_a_time_on_a_gpu_waits_for_its_work(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    assert timing.seconds_of(lambda: done.append("call"), "cuda", calls=2) > 0
    assert done == ["waited", "call", "call", "waited"]
    timing.seconds_of(lambda: done.append("call"))
    assert done[4:] == ["call"]


CASES = """
import pytest
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it(benchmark, device):
    benchmark.extra_info["ours_ms"] = 1.0
    benchmark.pedantic(lambda: None)
"""


def test_times_of_launches_are_not_in_the_records(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="what it writes is looked at")
    (tmp_path / "bench_it.py").write_text(CASES)
    shutil.copy(ROOT / "benchmarks" / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "bench_it.py", "--benchmark-json=raw.json"]
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_WORKER"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    records = json.loads((tmp_path / "raw.json").read_text())["benchmarks"]
    assert [("stats" in record, record["extra_info"]["ours_ms"]) for record in records] == [
        (True, 1.0),
        (False, 1.0),
    ]


ROWS = [
    {
        "case": "MLP, 16 rows",
        "ours_ms": 2.0,
        "yardsticks": {"loop": 9.0, "vmap": 3.0, "compiled loop": 1.5},
        "ratio": {"loop": 4.5, "vmap": 1.5, "compiled loop": 0.75},
        "ratio_range": {"loop": [4.4, 4.6], "vmap": [1.2, 2.1], "compiled loop": [0.7, 0.8]},
        "skipped": {"torch-uncertainty": "not installed"},
        "memory_mb": {"T=20": 3.0, "T=200": 3.3},
        "target": {"loop": 4.0, "vmap": 2.0, "compiled loop": 1.0, "memory": 1.05},
    },
    {
        "case": "fused",
        "ours_ms": 1.0,
        "yardsticks": {"copy_": 0.5},
        "ratio": {"copy_": 0.5},
        "gb_s": 17.0,
        "copy_gb_s": 20.0,
        "target": {"copy_": 0.8},
    },
]


def test_report(tmp_path, capsys):
    records = tmp_path / "raw.json"
    cpu = {"cpu": {"brand_raw": "Some CPU"}, "vectors": "AVX2"}
    machine = {**cpu, "threads": 2, "torch": "2.14.1"}
    benchmarks = [{"extra_info": row} for row in [*ROWS, {}]]
    record = {"machine_info": machine, "benchmarks": benchmarks, "datetime": "2026-01-02T03:04"}
    records.write_text(json.dumps(record))
    report.main([str(records)])
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert "Some CPU, AVX2, 2 threads, torch 2.14.1, commit no commit, 2026-01-02" in lines
    assert "MLP, 16 rows 2.000 loop 9.000 4.50x 4.40-4.60 4x met" in lines
    assert "vmap 3.000 1.50x 1.20-2.10 2x within noise" in lines
    assert "compiled loop 1.500 0.75x 0.70-0.80 1x MISSED" in lines
    assert "memory T=20 3.00 MB" in lines
    assert "memory T=200 3.30 MB 1.10x <= 1.05x MISSED" in lines
    assert "torch-uncertainty - not installed" in lines
    assert "fused 1.000 17.0 copy_ 0.500 20.0 GB/s 85% of copy_ 80% met" in lines
    text = (tmp_path / "raw.md").read_text()
    assert "| MLP, 16 rows | 2.000 |  | loop | 9.000 | 4.50x | 4.40-4.60 | 4x | met |" in text
    assert json.loads((tmp_path / "raw-table.json").read_text())["rows"] == ROWS
