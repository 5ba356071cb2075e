"""An interrupt between two lines of a context manager leaves the thread in no pass."""

import linecache
import threading
from pathlib import Path

import pytest
import torch
from interrupting import trace_lines
from torch import nn
from torch.utils.data import TensorDataset

import bnuq_ext as bnuq
from bnuq_ext import norm_calls, passes, reads, restore
from bnuq_ext.passes import current_pass
from bnuq_ext.proof import carried, masks, mixed
from bnuq_ext.untraced import ONE_MODE

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BATCHES = list(torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(1)))
# Functions of context managers that are interrupted, by file.
CUT = {
    passes.__file__: ("__enter__", "__exit__", "leave_pass"),
    restore.__file__: ("without_gradients",),
}


class Bare(nn.Module):
    """Not a plain chain of layers, so that it is tried."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(x).relu())


def made():
    model = bnuq.convert(Bare()).eval()
    bnuq.collect(model, BATCHES, progress=False)
    return model


def is_cut(code):
    return code.co_name in CUT.get(code.co_filename, ())


def in_a_body(model):
    with bnuq.replicas(model, 2, seed=0):
        model(X)


def fit(model):
    data = TensorDataset(torch.cat(BATCHES), torch.zeros(36, 3))
    options = dict(likelihood="gaussian", noise_var=1.0, num_samples=8, progress=False)
    bnuq.fit_batch_size(model, data, [4, 6], **options)


RUNS = {
    "replicas": in_a_body,
    "fit_batch_size": fit,
    "collect": lambda model: bnuq.collect(model, BATCHES, progress=False),
    "first predict": lambda model: bnuq.predict(model, X, likelihood="gaussian", seed=0),
    "loop": lambda model: bnuq.predict(model, X, likelihood="gaussian", seed=0, strategy="loop"),
    "doctor": lambda model: bnuq.doctor(model, X),
}


@pytest.mark.parametrize("name", RUNS)
def test_interrupted_at_every_line(name):
    model = made()
    expected, run = model(X), RUNS[name]
    last = {}
    for file, line, time in trace_lines(lambda: run(model), is_cut):
        last[file, line] = time
    assert len(last) > 8
    for (file, line), times in last.items():
        for time in sorted({1, (times + 1) // 2, times}):
            model = made()
            where = (
                f"{Path(file).name}:{line} {linecache.getline(file, line).strip()!r}, time {time}"
            )
            with pytest.raises(KeyboardInterrupt):
                trace_lines(lambda model=model: run(model), is_cut, (file, line, time))
            assert current_pass() is None and not passes._RUNNING, where
            assert torch.is_grad_enabled(), where
            assert torch.equal(model(X), expected), where


def modes_entered():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def free_for_others(lock):
    found = []

    def take():
        found.append(lock.acquire(timeout=0.5))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def compiles():
    from torch._dynamo.testing import CompileCounter  # whose import takes a second

    counter = CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(X)
    return counter.frame_count == 1


CORRUPTS = pytest.mark.skipif(
    torch.__version__ < (2, 11),
    reason="torch 2.10.0 ends the process here by SIGSEGV in each run, for its handle_torch_function "
    "corrupts Python's heap; 2.11 and later pass",
)
MODES = [
    *(reads.Reads, reads._Operations, reads._Functions, masks.Masks, carried.Carried),
    pytest.param(mixed.Mixed, marks=CORRUPTS),
    norm_calls.BatchNormCounter,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_interrupted_right_behind_the_entry_of_a_mode(mode, monkeypatch):
    def interrupted(self):
        monkeypatch.undo()
        enter(self)
        raise KeyboardInterrupt

    model = made()
    expected = bnuq.predict(model, X, likelihood="gaussian", seed=0, strategy="loop").mean
    enter = mode.__enter__
    with torch.device("cpu"):  # a mode of the caller
        monkeypatch.setattr(mode, "__enter__", interrupted)
        before = modes_entered()
        with pytest.raises(KeyboardInterrupt):
            RUNS["doctor" if mode is norm_calls.BatchNormCounter else "first predict"](model)
        assert modes_entered() == before
    assert modes_entered() == (0, 0) and free_for_others(ONE_MODE)
    assert compiles()
    torch.testing.assert_close(
        bnuq.predict(model, X, likelihood="gaussian", seed=0).mean, expected, rtol=1e-5, atol=1e-6
    )


def test_an_error_in_a_backward_does_not_leave_the_thread_in_a_forward_that_is_over():
    model = made()
    expected = model(X)
    with bnuq.replicas(model, 2, seed=0):
        y = model(X)

    def hook(grad):
        with pytest.raises(ValueError, match="likelihood"):
            bnuq.predict(model, X, likelihood="none")

    y.register_hook(hook)
    y.sum().backward()
    assert current_pass() is None and torch.equal(model(X), expected)


def test_frames_of_the_users_own_keep_what_they_hold():
    class Stops(nn.Module):
        stops = False

        def forward(self, x):
            held = x + 1
            if self.stops:
                raise KeyboardInterrupt
            return held

    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(6), Stops()))
    bnuq.collect(model, BATCHES, progress=False)
    model[1].stops = True
    with pytest.raises(KeyboardInterrupt) as caught:
        bnuq.predict(model, X, likelihood="gaussian", num_samples=4)
    assert caught.traceback[-1].frame.f_locals["held"].shape == X.shape


def test_an_error_inside_a_body_leaves_the_body():
    model, inner = made(), bnuq.convert(Bare()).eval()
    with bnuq.replicas(model, 2, seed=0):
        session = current_pass()
        with pytest.raises(ValueError, match="bank"):
            bnuq.predict(inner, X, likelihood="gaussian")
        assert current_pass() is session
        assert model(X).shape == (10, 3)
    assert current_pass() is None
