"""An interrupt that an error has taken the place of, in one of torch's modes or in a forward, is not
taken for the model's own error."""

import asyncio
import gc
import sys
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from weakref import ref

import pytest
import torch
from interrupting import cutting_torchs_modes
from torch import nn
from torch.overrides import TorchFunctionMode

import bnuq_ext as bnuq
from bnuq_ext.traps import DropoutTrace

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BATCHES = list(torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(1)))


class Net(nn.Module):
    """Not a plain chain of layers, so that it is tried; `meets(x)` is called in its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.meets = lambda x: None

    def forward(self, x):
        self.meets(x)
        return self.last(self.norm(x).relu())


def made(meets=lambda x: None):
    model = bnuq.to_bayesian(bnuq.convert(Net()).eval())
    bnuq.collect(model, BATCHES, progress=False)
    model.meets = meets
    return model


def predict(model, **options):
    return bnuq.predict(model, X, likelihood="gaussian", seed=0, **options)


def in_a_body(model):
    with bnuq.replicas(model, 3, seed=0):
        model(X)


def elbo(model):
    bnuq.elbo_loss(model, X, torch.arange(5) % 3, num_samples=3, dataset_size=50, seed=0)


RUNS = {
    "predict": predict,
    "loop": lambda model: predict(model, strategy="loop"),
    "doctor": lambda model: bnuq.doctor(model, X),
    "collect": lambda model: bnuq.collect(model, BATCHES, progress=False),
    "replicas": in_a_body,
    "elbo_loss": elbo,
}


def modes():
    stacks = (
        (torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at),
        (torch._C._len_torch_function_stack, torch._C._get_function_stack_at),
    )
    return [at(i) for depth, at in stacks for i in range(depth())]


def passages(run):
    model = made()
    with cutting_torchs_modes() as returns:
        run(model)
    assert returns
    return sorted({1, 2, 3, *range(4, len(returns), 5), len(returns)} & {*range(len(returns) + 1)})


def check_interrupted(run, model, at):
    with pytest.raises(KeyboardInterrupt), cutting_torchs_modes(at):
        run(model)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("loop", "collect")])
def test_in_torchs_modes(name):
    """They put aside the mode that handles a call: where they are interrupted the next to be left
    finds none."""
    expected = predict(made(), strategy="loop").mean
    for at in passages(RUNS[name]):
        model = made()
        check_interrupted(RUNS[name], model, at)
        gc.collect()
        assert modes() == [], at
        torch.testing.assert_close(predict(model).mean, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_in_torchs_modes_within_one_of_the_caller(name):
    """The next to be left finds another one."""
    with torch.device("cpu"):
        times, (outer,) = passages(RUNS[name]), modes()
        for at in times:
            check_interrupted(RUNS[name], made(), at)
            assert len(modes()) == 1 and modes()[0] is outer, at
    assert modes() == []


def failing(kind, at, calls=None, error=OSError):
    """Meets an interrupt and fails for it at the `at`-th of the calls."""
    calls = count(1) if calls is None else calls  # a list would be the model's, which it changes

    def meets(x):
        if next(calls) == at:
            try:
                raise kind("of a test")
            finally:
                raise error("its own")  # noqa: B012

    return meets


def num_forwards(run):
    calls = count(0)
    run(made(failing(KeyboardInterrupt, None, calls)))
    return next(calls)


def check_each(run, number, **options):
    for at in range(1, number + 1):
        with pytest.raises(KeyboardInterrupt, match="of a test"):
            run(failing(KeyboardInterrupt, at, **options))
        assert modes() == []


@pytest.mark.parametrize("name", RUNS)
def test_in_each_forward(name):
    users = name == "replicas"  # the last one is called by the body, and fails there as it would
    check_each(lambda meets: RUNS[name](made(meets)), num_forwards(RUNS[name]) - users)


def test_in_each_forward_of_rows_that_are_made_up():
    """Where an IndexError tells that the model takes none."""

    def run(model):
        model.register_forward_pre_hook(lambda _, given: (given[0].float(),))
        bnuq.predict(model, torch.arange(30).view(5, 6) % 4, likelihood="gaussian", seed=0)

    check_each(lambda meets: run(made(meets)), num_forwards(run), error=IndexError)


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, meets):
        ctx.meets = meets
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.meets(grad)
        return grad, None


def test_in_each_backward_of_a_trial():
    def run(meets):
        model = made()
        model.last.register_forward_hook(lambda module, given, y: Meeting.apply(y, meets))
        elbo(model)

    calls = count(0)
    run(failing(KeyboardInterrupt, None, calls))
    number = next(calls)
    assert number
    check_each(run, number)


@pytest.mark.parametrize("name", RUNS)
def test_an_exit_in_a_forward(name):
    with pytest.raises(SystemExit, match="of a test"):
        RUNS[name](made(failing(SystemExit, 1)))


def interrupts(x):
    raise KeyboardInterrupt


def interrupts_and_fails(x):
    failing(KeyboardInterrupt, 1)(x)


@pytest.mark.parametrize("meets", [interrupts, interrupts_and_fails])
@pytest.mark.parametrize("name", ["predict", "loop", "doctor", "elbo_loss"])
def test_what_a_forward_has_made_is_gone_with_its_interrupt(name, meets):
    """Not only once garbage is collected, as GPU memory would be."""
    made_there = SimpleQueue()  # a list would be put back

    def makes(x):
        activation = x + 1
        made_there.put(ref(activation))
        meets(x)

    model = made(makes)
    gc.collect()
    gc.disable()
    try:
        with suppress(KeyboardInterrupt, OSError):
            RUNS[name](model)
        assert made_there.qsize() > 0
        while made_there.qsize():
            assert made_there.get()() is None
    finally:
        gc.enable()


def makes_an_error(x):
    try:
        sys.exit("of a test")
    except SystemExit as error:
        raise TimeoutError("its own") from error


def makes_an_error_alone(x):
    try:
        sys.exit("of a test")
    except SystemExit:
        raise TimeoutError("its own") from None


def makes_an_error_of_a_cancellation(x):
    """As asyncio's time limits."""
    try:
        raise asyncio.CancelledError
    finally:
        raise TimeoutError("its own")  # noqa: B012


@pytest.mark.parametrize(
    "meets", [makes_an_error, makes_an_error_alone, makes_an_error_of_a_cancellation]
)
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_that_the_user_makes_an_error_of(name, meets):
    model = made()
    expected = predict(model, strategy="loop").mean
    model.meets = meets
    with pytest.raises(TimeoutError, match="its own"):
        RUNS[name](model)
    assert modes() == []
    model.meets = lambda x: None
    assert torch.equal(predict(model, strategy="loop").mean, expected)


@pytest.mark.parametrize("name", RUNS)
def test_an_error_made_of_one_that_has_taken_the_place_of_an_interrupt(name):
    def meets(x):
        try:
            interrupts_and_fails(x)
        except OSError as error:
            raise ValueError("of an OSError") from error

    with pytest.raises(KeyboardInterrupt, match="of a test"):
        RUNS[name](made(meets))


def is_refused(x):
    if len(x) != 5:
        raise ValueError("takes five rows")


def refuses(x):
    raise ValueError("takes none")


def generator():
    try:
        yield
    finally:
        raise ValueError("takes none")  # noqa: B012


def refuses_as_it_closes_a_generator(x):
    opened = generator()
    next(opened)
    opened.close()


@pytest.mark.parametrize("meets", [refuses, refuses_as_it_closes_a_generator])
@pytest.mark.parametrize("name", ["predict", "loop", "doctor", "elbo_loss"])
def test_an_error_while_the_user_handles_an_interrupt(name, meets):
    model = made()
    expected = predict(model, strategy="loop").mean
    model.meets = meets
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="takes none"):
            RUNS[name](model)
        model.meets = is_refused  # in trials
        assert torch.equal(predict(model).mean, expected)
    if name == "loop":
        check_handled_in_a_generator(model, expected)


def check_handled_in_a_generator(model, expected):
    def predicts():
        try:
            yield
        except KeyboardInterrupt:
            yield predict(model).mean

    own = predicts()
    next(own)
    assert torch.equal(own.throw(KeyboardInterrupt()), expected)


def test_errors_in_a_ring():
    def meets(x):
        first, second = ValueError("first"), ValueError("second")
        first.__context__, second.__context__ = second, first
        raise first

    with pytest.raises(ValueError, match="first"):
        RUNS["doctor"](made(meets))


class Users(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [None, ValueError])
def test_modes_that_a_forward_has_left_open(error):
    """Those of this package are left, whatever stands above them; a model may enter one to stay."""
    model, stays = made(), Users()

    def meets(x):
        model.meets = lambda x: None
        for mode in (DropoutTrace(model), stays, DropoutTrace(model)):
            mode.__enter__()
        if error is not None:
            raise error("its own")

    model.meets = meets
    if error is None:
        predict(model, strategy="loop")
    else:
        with pytest.raises(error, match="its own"):
            predict(model, strategy="loop")
    assert modes() == [stays]
    stays.__exit__(None, None, None)
    assert modes() == []
