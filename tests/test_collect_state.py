"""`collect` leaves the model and the generators as found: after success, errors and interrupts."""

import copy
import gc
import linecache
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupting import trace_lines
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq
from bnuq_ext.passes import current_pass
from bnuq_ext.restore import drawn_since, evaluating, preserved_rng, random_states

ROWS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.ReLU())
        self.plain = nn.BatchNorm1d(5)
        self.head = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.fail = None

    def forward(self, x):
        x = self.body(x)
        if self.fail is not None:
            self.fail()
        return self.head(self.plain(x))


def make_model():
    """A model with mixed flags, gradients, hooks, moved running statistics, and a bank."""
    model = bnuq.convert(Net(), filter_fn=lambda name, module: name != "plain").train()
    model(ROWS).sum().backward()
    bnuq.collect(model, list(ROWS.split(10)), 6)
    model.body[1].eval()
    model.plain.eval()
    model.head[0].weight.requires_grad_(False)
    model.body.register_forward_hook(lambda module, inputs, output: None)
    model.head.register_forward_pre_hook(lambda module, inputs: None)
    return model


class Noisy(torch_data.Dataset):
    """Draws from every generator, as transforms do; `fail(index)` may raise."""

    def __init__(self, fail=lambda index: None):
        self.fail = fail

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        self.fail(index)
        return ROWS[index] + torch.rand(()) + np.random.rand() + random.random()


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")


def state(model, *generators):
    """All that has to be as before, in a form that can be compared."""
    found = {"grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled()}
    for name, module in model.named_modules():
        found[name, "training"] = module.training
        found[name, "hooks"] = [list(getattr(module, hooks).items()) for hooks in HOOKS]
        found[name, "attributes"] = sorted(vars(module))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = tensor.detach().flatten().tolist()
        found[name, "tensor"] = (values, tensor.requires_grad, tensor._version, id(tensor))
        found[name, "gradient"] = None if tensor.grad is None else tensor.grad.flatten().tolist()
    found["torch"] = torch.get_rng_state().tolist()
    found["numpy"] = repr(np.random.get_state())
    found["python"] = random.getstate()
    found["generators"] = [generator.get_state().tolist() for generator in generators]
    if torch.cuda.is_initialized():
        found["cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return found


def banks(model):
    return [layer.bank for layer in (model.body[1], model.head[1])]


@contextmanager
def left_as_found(model, *generators):
    before, held = state(model, *generators), banks(model)
    yield
    after = state(model, *generators)
    different = [key for key in before if before[key] != after[key]]
    assert not different and before.keys() == after.keys()
    assert banks(model) == held


def noisy_loader(**arguments):
    return torch_data.DataLoader(Noisy(), batch_size=6, shuffle=True, **arguments)


@pytest.mark.parametrize(
    "source",
    [
        lambda: {"data": noisy_loader()},
        lambda: {"data": noisy_loader(num_workers=2)},
        lambda: {"data": Noisy(), "batch_size": 6},
        lambda: {"data": (Noisy()[i : i + 6] for i in range(0, 60, 6))},
    ],
    ids=["loader", "workers", "data set", "iterable"],
)
def test_after_success(source):
    model, before = make_model(), None
    held = banks(model)
    before = state(model)
    bank = bnuq.collect(model, **source(), num_batches=10)
    assert state(model) == before
    assert banks(model) == [bank, bank] and held[0] is not bank


class NoisyStream(torch_data.IterableDataset):
    def __iter__(self):
        return (torch.randn(ROWS.shape[1]) for _ in range(60))


def test_the_generator_of_a_loader_of_a_stream():
    own, model = torch.Generator().manual_seed(1), make_model()
    data = torch_data.DataLoader(NoisyStream(), batch_size=6, generator=own)
    before = state(model, own)
    bnuq.collect(model, data, 10)
    assert state(model, own) == before


def test_generators_of_a_loader():
    own, samplers = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    sampler = torch_data.RandomSampler(range(60), generator=samplers)
    data = torch_data.DataLoader(Noisy(), batch_size=6, sampler=sampler, generator=own)
    model = make_model()
    before = state(model, own, samplers)
    bnuq.collect(model, data, 15)
    assert state(model, own, samplers) == before


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_grad_mode_and_inference_mode(grad, inference):
    model = make_model()
    with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
        before = state(model)
        bank = bnuq.collect(model, list(ROWS.split(10)), 6)
        assert state(model) == before
    tensors = (*bank.mean.values(), *bank.var.values(), *bank.count.values())
    assert not any(t.is_inference() or t.requires_grad for t in tensors)


class Broken(Exception):
    pass


def raise_at(call, error):
    """A function that raises on its `call`-th call, and never again."""
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == call:
            raise error("injected")

    return fail


ERRORS = pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, SystemExit, GeneratorExit])


@ERRORS
@pytest.mark.parametrize("call", [1, 4])
def test_after_an_error_in_the_model(error, call):
    model = make_model()
    model.fail = raise_at(call, error)
    with left_as_found(model), pytest.raises(error, match="injected"):
        bnuq.collect(model, noisy_loader(), 15)


@ERRORS
@pytest.mark.parametrize("call", [1, 25])
def test_after_an_error_in_the_data(error, call):
    model = make_model()
    for source in (
        {"data": torch_data.DataLoader(Noisy(raise_at(call, error)), 6, shuffle=True)},
        {"data": Noisy(raise_at(call, error)), "batch_size": 6},
    ):
        with left_as_found(model), pytest.raises(error, match="injected"):
            bnuq.collect(model, **source, num_batches=15)


@ERRORS
def test_after_an_error_in_a_hook_or_in_input_fn(error):
    model = make_model()
    with left_as_found(model), pytest.raises(error, match="injected"):
        fail = raise_at(3, error)
        bnuq.collect(model, noisy_loader(), 15, input_fn=lambda batch: (fail(), batch)[1])
    model.head[1].register_forward_hook(raise_at(2, error))
    with left_as_found(model), pytest.raises(error, match="injected"):
        bnuq.collect(model, noisy_loader(), 15)


def test_after_an_error_in_a_worker():
    model = make_model()
    data = torch_data.DataLoader(Noisy(raise_at(9, Broken)), 6, shuffle=True, num_workers=2)
    with left_as_found(model), pytest.raises(Broken, match="injected"):
        bnuq.collect(model, data, 15)


def test_after_a_warning_that_is_an_error():
    model = make_model()
    with left_as_found(model), pytest.raises(UserWarning, match="were left out"):
        bnuq.collect(model, [*ROWS.split(10), ROWS[:1]], 7)
    with left_as_found(model), pytest.raises(UserWarning, match="does not shuffle"):
        bnuq.collect(model, torch_data.DataLoader(Noisy(), 6), 7)


# Entering and leaving the contexts of `restore` and `replicas` is not cut:
# an interrupt inside a `finally` cannot be undone.
PACKAGE = Path(bnuq.__file__).parent
CUT = {str(PACKAGE / name) for name in ("collect.py", "batches.py", "bank.py", "inputs.py")}


def leaves(file, line):
    """Whether Python passes the line again to leave a context, before its `__exit__` is called."""
    return sys.version_info < (3, 11) and linecache.getline(file, line).lstrip().startswith("with ")


def is_cut(code):
    return code.co_filename in CUT


def test_interrupted_at_every_line():
    """KeyboardInterrupt at the first, second and last passage of every line of the collector."""
    model = make_model()
    old = banks(model)[0]
    last, data = {}, noisy_loader()

    def run():
        bnuq.collect(model, data, 3)

    for file, line, time in trace_lines(run, is_cut):
        if time == 1 or not leaves(file, line):
            last[file, line] = time
    bnuq.attach(model, old)
    before, cases = state(model), 0
    for (file, line), times in last.items():
        for time in sorted({1, 2, times} & set(range(1, times + 1))):
            text = linecache.getline(file, line).strip()
            where = f"{Path(file).name}:{line} {text!r}, time {time}"
            with pytest.raises(KeyboardInterrupt):
                trace_lines(run, is_cut, (file, line, time))
            cases += 1
            assert state(model) == before and current_pass() is None, where
            held = banks(model)
            # All of the old bank or, after attach, all of the new one.
            assert held[0] is held[1], where
            assert held[0] is old or "return bank" in where, where
            bnuq.attach(model, old)
    assert cases > 200


def test_memory_is_the_banks():
    """No batch outlives its turn, and nothing keeps a graph."""
    alive = weakref.WeakSet()
    most = []

    def data():
        for i in range(40):
            batch = ROWS[i % 5 : i % 5 + 20].clone().requires_grad_()
            alive.add(batch)
            most.append(len(alive))
            yield batch
            del batch

    outputs = weakref.WeakSet()
    model = make_model()
    model.register_forward_hook(lambda module, inputs, output: outputs.add(output))
    gc.disable()  # what reference counts leave behind would grow until a collection
    try:
        bank = bnuq.collect(model, data(), 40)
    finally:
        gc.enable()
    assert max(most) <= 2 and len(alive) == 0 and len(outputs) == 0
    stored = [t for group in (bank.mean, bank.var) for t in group.values()]
    assert sum(t.untyped_storage().nbytes() for t in stored) == 2 * 40 * (5 + 3) * 4


def test_sixteen_threads():
    """Sixteen models at a time, each collected as alone."""
    models = [make_model() for _ in range(16)]
    data = [list((ROWS + i).split(10)) for i in range(16)]
    alone = [bnuq.collect(copy.deepcopy(m), d, 6) for m, d in zip(models, data, strict=True)]
    before = [state(model) for model in models]
    together = threading.Barrier(16)

    def work(i):
        together.wait()
        return bnuq.collect(models[i], data[i], 6)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(work, range(16)))
    assert all(mine.equal(other) for mine, other in zip(found, alone, strict=True))
    assert [state(model) for model in models] == before


@pytest.mark.parametrize("late", [False, True])
def test_flags_when_the_first_to_come_is_the_first_to_leave(late):
    model = make_model()
    before = state(model)
    first, second = evaluating(list(model.modules())), evaluating(list(model.body.modules()))
    first.__enter__()
    if late:  # everything is in eval already
        second = evaluating(list(model.body.modules()))
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.head.training and not any(module.training for module in model.body.modules())
    second.__exit__(None, None, None)
    assert state(model) == before


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random])
def test_random_states_show_a_draw(draw):
    before = random_states()
    assert not drawn_since(before)
    draw()
    assert drawn_since(before)


def test_flags_of_one_model_under_sixteen_threads():
    model = make_model()
    before, together = state(model), threading.Barrier(16)

    def work(i):
        together.wait()
        for turn in range(20):
            part = (model, model.body, model.head)[(i + turn) % 3]
            with evaluating(list(part.modules())):
                assert not any(module.training for module in part.modules())
        return i

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == list(range(16))
    assert state(model) == before


def test_batches_are_not_written_into():
    model = bnuq.convert(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(ROWS.shape[1])))
    batches = [x.clone() for x in ROWS.split(10)]
    bnuq.collect(model, batches, 12)
    bnuq.doctor(model, batches[0])
    bnuq.predict(
        model, batches[1], likelihood="gaussian", num_samples=2, sampler="batch", loader=batches
    )
    assert all(torch.equal(x, given) for x, given in zip(batches, ROWS.split(10), strict=True))


def test_preserved_rng(device):
    generator = torch.Generator().manual_seed(0)
    torch.rand(1, device=device)
    before = state(nn.Identity(), generator)
    with preserved_rng(generator):
        torch.rand(5), np.random.rand(5), random.random(), torch.rand(5, generator=generator)
        torch.rand(5, device=device)
        changed = state(nn.Identity(), generator)
    assert state(nn.Identity(), generator) == before
    names = ["torch", "numpy", "python", "generators"]
    assert all(changed[name] != before[name] for name in names)
