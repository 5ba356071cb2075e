"""Layers that a forward calls in threads of its own, where a pass is not."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import restore
from bnuq_ext.chain_folding import ChainFolding
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.state import State, modules_of

TEXT = "called in another thread than the forward's"


class Branches(nn.Module):
    def __init__(self, in_threads: bool):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2))
        self.head, self.in_threads = nn.BatchNorm1d(6), in_threads

    def forward(self, x):
        if not self.in_threads:
            return self.head(torch.cat([self.a(x), self.b(x)], 1))
        with ThreadPoolExecutor(2) as pool:
            return self.head(torch.cat([*pool.map(lambda f: f(x), (self.a, self.b))], 1))


def data() -> list[torch.Tensor]:
    return list(torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(0)))


def test_a_collection_says_which_it_has_missed():
    model = bnuq.convert(Branches(True).eval())
    with pytest.warns(UserWarning, match=f"^collect: a.1, b.1: {TEXT}") as caught:
        bank = bnuq.collect(model, data(), progress=False)
    assert list(bank.mean) == ["head"] and len(caught) == 1
    options = {"likelihood": "gaussian", "num_samples": 4}
    with pytest.warns(UserWarning, match=f"^predict: a.1, b.1: {TEXT}") as caught:
        bnuq.predict(model, data()[0], **options)
    assert len(caught) == 1
    bnuq.predict(model, data()[0], **options)  # once
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    bnuq.predict(model, data()[0], **options)  # whatever its weights are


def test_doctor_and_bodies_of_replicas_say_it_too():
    model = bnuq.convert(Branches(True).eval())
    assert any(TEXT in text for text in bnuq.doctor(model, data()[0]).warnings)
    with pytest.warns(UserWarning, match=TEXT):
        bnuq.collect(model, data(), progress=False)
    with pytest.warns(UserWarning, match=f"^replicas: a.1, b.1: {TEXT}"), bnuq.replicas(model, 1):
        model(data()[0])


def test_bayesian_layers_too():
    model = bnuq.to_bayesian(Branches(True).train())
    for layer in (model.a[1], model.b[1], model.head):
        layer.eval()
    model.c = bnuq.BayesLinear(6, 2)
    model.register_forward_hook(lambda module, args, output: module.c(output))
    y = torch.zeros(12).long()
    with pytest.warns(UserWarning, match=f"^elbo_loss: a.0, b.0: {TEXT}"):
        bnuq.elbo_loss(model, data()[0], y, batch_weight=0.1)


def test_every_body_that_a_layer_belongs_to_is_told():
    """Of two bodies in each other the layer's is the outer one."""
    model, other = (bnuq.convert(Branches(threads).eval()) for threads in (True, False))
    with pytest.warns(UserWarning, match=TEXT):
        bnuq.collect(model, data(), progress=False)
    bnuq.collect(other, data(), progress=False)
    with bnuq.replicas(model, 1), bnuq.replicas(other, 1):
        with pytest.warns(UserWarning, match=f"^replicas: a.1, b.1: {TEXT}"):
            model(data()[0])


def test_calls_that_its_own_thread_makes_are_missed_by_nobody():
    """Of a model that another thread uses at the same time."""
    model = bnuq.convert(Branches(False).eval())
    bnuq.collect(model, data(), progress=False)
    stop = threading.Event()

    def use():
        while not stop.is_set():
            model(data()[0])

    user = threading.Thread(target=use)
    user.start()
    try:
        for _ in range(20):
            bnuq.predict(model, data()[0], likelihood="gaussian", num_samples=8)
        bnuq.collect(model, data(), progress=False)
        assert not [w for w in bnuq.doctor(model, data()[0]).warnings if TEXT in w]
    finally:
        stop.set()
        user.join()


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_a_model_is_looked_at_while_another_thread_changes_it():
    """Without copies of its dicts some 7 of 5,000 looks fail."""
    model, done = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]), threading.Event()

    def change():
        while not done.is_set():
            handles = [m.register_forward_pre_hook(lambda *_: None) for m in model for _ in "ab"]
            for handle, layer in zip(handles[::2], model, strict=True):
                handle.remove()
                layer.other = True
            for handle, layer in zip(handles[1::2], model, strict=True):
                handle.remove()
                del layer.other

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            for _ in range(5000):
                fingerprint(modules_of(model))
        finally:
            done.set()
        changing.result()


AHEAD: list[bnuq.Bank | None] = []  # by coming forwards: what another thread attaches


class Attaching(Branches):
    def forward(self, x):
        bank = AHEAD.pop(0) if AHEAD else None
        if bank is not None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(bnuq.attach, self, bank).result()
        return super().forward(x)


@pytest.mark.parametrize("forwards", [0, 1, 4])  # before: none, or some of the trial
def test_a_bank_that_another_thread_attaches_while_a_model_is_tried(forwards):
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 0}
    plain, x = Attaching(in_threads=False).eval(), data()[0]
    expected, model = bnuq.convert(plain), bnuq.convert(plain)
    other = bnuq.collect(expected, [2 * batch + 1 for batch in data()], 4, progress=False)
    wanted = bnuq.predict(expected, x, **options).mean
    bnuq.collect(model, data(), 4, progress=False)
    AHEAD[:] = [*[None] * forwards, other]
    assert not torch.allclose(bnuq.predict(model, x, **options).mean, wanted)
    assert AHEAD == []
    torch.testing.assert_close(bnuq.predict(model, x, **options).mean, wanted)


class Added(WeakSet):
    """Other threads add to it whenever it is gone through."""

    def __iter__(self):
        raise RuntimeError("Set changed size during iteration")


class OwnModes(nn.Linear):
    def train(self, mode=True):
        return super().train(mode)


def test_classes_that_another_thread_warns_of_meanwhile(monkeypatch):
    monkeypatch.setattr(restore, "_WARNED_OF", Added())
    model = bnuq.convert(nn.Sequential(OwnModes(4, 3), nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match="of its own: OwnModes;"):
        bnuq.collect(model, data(), progress=False)
    bnuq.predict(model, data()[0], likelihood="gaussian", num_samples=2)  # once


def test_a_chain_whose_sizes_another_thread_forgets(monkeypatch):
    monkeypatch.setattr(ChainFolding, "remember", lambda *args: None)
    model = bnuq.convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval())
    bnuq.collect(model, data(), progress=False)
    options = {"likelihood": "gaussian", "num_samples": 2, "seed": 0}
    pred = bnuq.predict(model, data()[0], **options)
    loop = bnuq.predict(model, data()[0], strategy="loop", **options)
    torch.testing.assert_close(pred.mean, loop.mean)


class AddsOne:
    """Stands for a thread that sets an attribute while others are looked through."""

    def __init__(self, module):
        self.module = module

    def __contains__(self, name):
        vars(self.module)["of another"] = 1
        return False


def test_an_attribute_that_another_thread_sets_meanwhile(monkeypatch):
    module = nn.BatchNorm1d(3)
    monkeypatch.setattr(nn.BatchNorm1d, "not_by_forwards", AddsOne(module), raising=False)
    State([module])
    assert vars(module)["of another"] == 1
