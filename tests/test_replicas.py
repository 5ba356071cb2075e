"""replicas: the replicas of predict from calls of the model itself, with gradients and threads."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from coupled import COUPLED, FOLDS, ROWS, Bypass, Dropping, Gated, Graph, Norms
from predicting import DATA, X, make_flexible, make_model
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.nn import named_stochastic_layers

T = 5


def expected(model, x=X, seed=3, sampler="bank", first=0, num_samples=T, **options):
    return bnuq.predict(
        model, x, likelihood="gaussian", num_samples=num_samples, seed=seed, sampler=sampler,
        first_replica=first, strategy="loop", keep_samples=True, **options,
    ).samples  # fmt: skip


def close(actual, samples):
    torch.testing.assert_close(
        actual.unflatten(0, samples.shape[:2]), samples, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
def test_rows_are_the_replicas_of_predict(model, sampler):
    with torch.no_grad(), bnuq.replicas(model, T, 3, sampler=sampler, first_replica=2):
        close(model(X), expected(model, sampler=sampler, first=2))
        close(model(X[:4]), expected(model, X[:4], sampler=sampler, first=2))
    with torch.no_grad(), bnuq.replicas(model, T, 3, sampler="joint", batch_size=20):
        close(model(X), expected(model, sampler="joint", batch_size=20))


def test_one_replica_no_rows_and_no_seed(model):
    with torch.no_grad(), bnuq.replicas(model, 1, 3):
        close(model(X), expected(model, num_samples=1))
    with bnuq.replicas(model, T):
        assert model(X[:0]).shape == (0, 5)
        assert model(X).shape == (T * 9, 5)


def test_the_model_is_itself_again_afterwards(model):
    before = model(X)
    with bnuq.replicas(model, T, 3):
        model(X)
    assert torch.equal(model(X), before)
    with pytest.raises(KeyError), bnuq.replicas(model, T, 3):
        raise KeyError
    assert torch.equal(model(X), before)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_copy_made_inside_is_an_ordinary_model(model):
    plain, samples = model(X), expected(model)
    with bnuq.replicas(model, T, 3):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(X), plain)
            assert torch.equal(expected(copied), samples)
        assert torch.equal(bnuq.revert(model)(X), plain)
        close(model(X), samples)
    assert torch.equal(copied(X), plain)


def test_bodies_in_each_other(model):
    other = make_model()
    torch.nn.init.normal_(other[8].weight)
    plain, theirs = model(X), expected(other, seed=4, num_samples=2)
    with torch.no_grad(), bnuq.replicas(model, T, 3):
        with bnuq.replicas(other, 2, 4):
            for _ in range(2):
                close(model(X), expected(model))
                close(other(X), theirs)
            assert torch.equal(expected(other, seed=4, num_samples=2), theirs)
        with bnuq.replicas(model, 2, 5):
            close(model(X), expected(model, seed=5, num_samples=2))
            with bnuq.replicas(other, 2, 4), pytest.raises(KeyError):
                close(model(X), expected(model, seed=5, num_samples=2))
                raise KeyError
        close(model(X), expected(model))
        assert torch.equal(other(X), bnuq.revert(other)(X))
    assert torch.equal(model(X), plain)


def test_gradients_are_those_of_the_loop(model):
    with bnuq.replicas(model, T, 3):
        loss = F.cross_entropy(model(X), torch.arange(9).repeat(T) % 5)
    folded = torch.autograd.grad(loss, list(model.parameters()))
    losses = []
    for t in range(T):
        with bnuq.replicas(model, 1, 3, first_replica=t):
            losses.append(F.cross_entropy(model(X), torch.arange(9) % 5))
    loop = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
    for a, e in zip(folded, loop, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6)
        assert a.abs().max() > 0


def test_training_flags_are_the_users(model):
    model.train()
    running = model[1].running_mean.clone()
    seen = []
    model[3].register_forward_hook(lambda m, args, out: seen.append(m.training))
    with bnuq.replicas(model, T, 3):
        model(X)
        seen.clear()
        out = model(X).unflatten(0, (T, 9))
    assert seen == [True] and model.training and torch.equal(model[1].running_mean, running)
    assert (out - expected(model)).abs().max() > 0.01  # dropout


def test_inputs_and_outputs_of_any_form():
    model, x, scale = make_flexible(), torch.randn(6, 4), torch.rand(6, 1)
    loop = [
        expected(model, {"x": x, "scale": scale, "flip": True}, output_fn=lambda o, k=key: o[k])
        for key in ("logits", "features")
    ]
    with torch.no_grad(), bnuq.replicas(model, T, 3):
        for out in (model(x, scale, flip=True), model(flip=True, scale=scale, x=x)):
            close(out["logits"], loop[0])
            close(out["features"], loop[1])


def test_a_pre_hook_of_the_user_sees_what_the_user_gives(model):
    model.register_forward_pre_hook(lambda module, args: (args[0].unflatten(1, (2, 6, 6)),))
    with torch.no_grad(), bnuq.replicas(model, T, 3):
        close(model(X.flatten(1)), expected(model, X.flatten(1)))


def coupled(cls):
    torch.manual_seed(0)
    made = bnuq.convert(cls()).eval()
    bnuq.collect(made, [ROWS[i : i + 6] * (1 + 0.1 * i) for i in range(8)], 8, progress=False)
    return made


@pytest.mark.parametrize("cls", [*COUPLED, Dropping])
def test_models_whose_rows_meet_are_right_or_refused(cls):
    for rows in (6, 24):
        if cls is Graph and rows != 6:
            continue
        model = coupled(cls)
        samples = expected(copy.deepcopy(model), ROWS[:rows])
        try:
            with torch.no_grad(), bnuq.replicas(model, T, 3):
                for _ in range(2):
                    close(model(ROWS[:rows]), samples)
        except ValueError as error:
            assert "replicas: model must give the same folded as one by one" in str(error)
            assert cls not in FOLDS


def test_expanded_inputs_carry_gradients():
    model, x = coupled(Bypass), ROWS[:6].clone().requires_grad_()
    with bnuq.replicas(model, T, 3):
        (folded,) = torch.autograd.grad(model(x).square().sum(), x)
    loop = torch.zeros_like(x)
    for t in range(T):
        with bnuq.replicas(model, 1, 3, first_replica=t):
            loop += torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(folded, loop, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_sixteen_threads_with_seeds_of_their_own(training):
    model = coupled(Gated).train(training)
    inputs = [ROWS[i : i + 6 + i % 3] for i in range(16)]
    samples = [expected(model, inputs[i], seed=i) for i in range(16)]
    plain = copy.deepcopy(model).eval()(ROWS)
    start = threading.Barrier(17)

    def work(i):
        start.wait()
        for _ in range(5):
            with torch.no_grad(), bnuq.replicas(model, T, i):
                model(inputs[i])
                pred = bnuq.predict(model, ROWS[:3], likelihood="gaussian", seed=1)
                assert pred.mean.shape == (3, 4)
                found = model(inputs[i])
        return found

    with ThreadPoolExecutor(16) as pool:
        found = pool.map(work, range(16))
        start.wait()
        if not training:
            for _ in range(20):  # this thread has no replicas
                torch.testing.assert_close(model(ROWS), plain)
    for out, e in zip(found, samples, strict=True):
        close(out, e)
    assert all(m.training == training for m in model.modules()) and not model._forward_pre_hooks


class Half(nn.Module):
    """A stochastic norm, and one that was left out."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.other(self.norm(x))


def test_batch_norm_in_training_that_is_not_stochastic_is_refused():
    model = bnuq.convert(Half(), filter_fn=lambda name, module: name == "norm").eval()
    bnuq.collect(model, list(ROWS.split(8)), 8, progress=False)
    with bnuq.replicas(model, T, 3):
        model(ROWS)
        model.train()
        with pytest.raises(
            ValueError, match="batch norm that is not stochastic must be in eval.* other in train"
        ):
            model(ROWS)
        model.other.eval()
        model(ROWS)


class OwnNorm(nn.Module):
    """Batch norm of somebody else: running statistics in eval, those of the batch in train()."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, x):
        mean, var = (
            (x.mean(0), x.var(0)) if self.training else (self.running_mean, self.running_var)
        )
        return (x - mean) / (var + 1e-5).sqrt()


class OwnNorms(Half):
    def __init__(self):
        super().__init__()
        self.other = OwnNorm()
        self.third = nn.InstanceNorm1d(8)  # keeps no statistics

    def forward(self, x):
        return self.third(super().forward(x).unsqueeze(2).repeat(1, 1, 2) * torch.ones(2).cumsum(0))


def test_batch_norm_of_an_unknown_class_in_training_is_refused():
    with pytest.warns(UserWarning, match="not converted: other"):
        model = bnuq.convert(OwnNorms(), strict=False).eval()
    bnuq.collect(model, list(ROWS.split(8)), 8, progress=False)
    with bnuq.replicas(model, T, 3):
        model.train()
        with pytest.raises(ValueError, match="must be in eval.* got other in train"):
            model(ROWS)
        model.other.eval()
        model(ROWS)


class Branching(Norms):
    """Does something else in train()."""

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h[:4] if self.training else h))


def test_a_call_that_is_not_that_of_eval_is_refused():
    model = coupled(Branching)
    with bnuq.replicas(model, T, 3):
        model(ROWS[:6])
        model.train()
        with pytest.raises(
            ValueError,
            match="replicas: model must give the same folded as one by one, got .* 4 rows",
        ):
            model(ROWS[:6])


class Shorter(nn.Module):
    """Leaves a layer out in train()."""

    def __init__(self):
        super().__init__()
        self.first, self.second = bnuq.BayesLinear(8, 8), bnuq.BayesLinear(8, 8)

    def forward(self, x):
        h = self.first(x).relu()
        return h if self.training else self.second(h)


def test_fewer_calls_than_in_eval_are_refused():
    model = Shorter()
    with (
        bnuq.replicas(model, T, 3),
        pytest.raises(
            ValueError, match="one by one, got the forward made 1 stochastic calls, .* 2"
        ),
    ):
        model(ROWS[:6])


def test_rejects(model):
    def enter(*args, **options):
        with bnuq.replicas(*args, **options):
            pass

    refusals = {
        "num_samples must be at least 1, got 0": ((model, 0), {}),
        "first_replica must be at least 0, got -1": ((model, 2), {"first_replica": -1}),
        "sampler must be one of .* got 'mc'": ((model, 2), {"sampler": "mc"}),
        'sampler must draw from the bank, got "batch"': ((model, 2), {"sampler": "batch"}),
        'batch_size must be None with sampler "bank"': ((model, 2), {"batch_size": 9}),
        r"seed must lie in": ((model, 2, 2**63), {}),
        "model must contain stochastic batch-norm layers": ((nn.Linear(2, 2), 2), {}),
        "model must have a bank": ((bnuq.convert(nn.BatchNorm1d(2)), 2), {}),
    }
    for message, (args, options) in refusals.items():
        with pytest.raises(ValueError, match=f"replicas: {message}"):
            enter(*args, **options)
    message = r"replicas: model must not be compiled \(its parts may be\), got "
    with pytest.raises(TypeError, match=message + "OptimizedModule"):
        enter(torch.compile(model, backend="eager"), 2)
    itself = copy.deepcopy(model)
    itself.compile(backend="eager")
    with pytest.raises(TypeError, match=message + "Sequential"):
        enter(itself, 2)
    with bnuq.replicas(model, 2, 0):
        with pytest.raises(ValueError, match="replicas: model must share no stochastic layer with"):
            enter(nn.Sequential(model), 2)
        with pytest.raises(ValueError, match="replicas: model must share no stochastic layer with"):
            enter(model[1], 2)

        def inside(*_):
            enter(make_model(), 2)

        with model[0].register_forward_pre_hook(inside):
            with pytest.raises(ValueError, match="replicas: the body of another pass must be left"):
                bnuq.predict(model, X, likelihood="gaussian", strategy="loop")
        with pytest.raises(
            ValueError, match="replicas: model must be called itself, got a call of one of its"
        ):
            model[1](DATA[:3].repeat(1, 3, 1, 1))
    assert len(named_stochastic_layers(model)) == 2


def test_a_part_is_refused_after_a_call_of_the_whole_too():
    model, x = nn.Sequential(bnuq.BayesLinear(4, 4), nn.Tanh()), torch.randn(6, 4)
    with torch.no_grad(), bnuq.replicas(model, T, 3):
        model(x)
        with pytest.raises(ValueError, match="model must be called itself, got a call of one"):
            model[0](x)


@pytest.mark.parametrize("num_samples", [1, T])
def test_a_part_is_refused_after_a_call_that_raised(num_samples, monkeypatch):
    """A pass left behind would take the part's call for one more of the call that failed."""
    model, x = nn.Sequential(bnuq.BayesLinear(4, 4), Failing()), torch.randn(6, 4)
    with torch.no_grad(), bnuq.replicas(model, num_samples, 3):
        whole = model(x)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="^on purpose$"):
            patched.setattr(Failing, "fails", True)  # of the class: the plan stands
            model(x)
        with pytest.raises(ValueError, match="model must be called itself, got a call of one"):
            model[0](x)
        assert torch.equal(model(x), whole)


class Failing(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("on purpose")
        return x.tanh()


def test_an_output_without_rows_is_refused(model):
    scalar = nn.Sequential(model, Mean())
    with (
        bnuq.replicas(scalar, T, 3),
        pytest.raises(ValueError, match="output must consist of tensors with rows"),
    ):
        scalar(X)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()
