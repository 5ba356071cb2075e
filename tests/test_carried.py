"""What a forward leaves for the next: a trial's own values must not come there."""

from functools import partial

import pytest
import torch
from coupled import ROWS
from folded import prepared, samples, way
from torch import Tensor, nn

import bnuq_ext as bnuq

TABLE = {}


def absmax(table, module, args, out):
    """Scales by the largest value that was ever seen, which no row of these tests reaches."""
    table["most"] = torch.maximum(table["most"], out.detach().abs().amax())
    return out / table["most"]


class Observer:
    def __init__(self):
        self.most = torch.tensor(100.0)

    def __call__(self, module, args, out):
        self.most = torch.maximum(self.most, out.detach().abs().amax())
        return out / self.most

    def method(self, module, args, out):
        return self(module, args, out)


class ScaledByGlobal(nn.Module):
    def forward(self, h):
        TABLE["most"] = torch.maximum(TABLE["most"], h.abs().amax())
        return h / TABLE["most"]


def in_place(most):
    return lambda module, args, out: out / most.copy_(torch.maximum(most, out.abs().amax()))


def by_data(most):
    def hook(module, args, out):
        most.data.copy_(torch.maximum(most, out.abs().amax()))  # of which no version tells
        return out / most

    return hook


def by_setting_data(most):
    def hook(module, args, out):
        most.data = torch.maximum(most, out.detach().abs().amax())
        return out / most

    return hook


def growing(seen):
    def hook(module, args, out):
        seen.append(out.detach().abs().amax())
        return out / torch.stack(seen).amax()

    return hook


@torch.no_grad()
def decorated(module, args, out):
    return absmax(TABLE, module, args, out)


class Foreign:
    """Of another package than the model, by its name."""

    __module__ = "elsewhere.observers"
    most = torch.tensor(100.0)

    def scale(self, out):
        self.most = torch.maximum(self.most, out.abs().amax())
        return out / self.most


class ScaledByForeign(nn.Module):
    def __init__(self):
        super().__init__()
        self.observer = Foreign()

    def forward(self, h):
        return self.observer.scale(h)


def with_table(add):
    def build(model):
        table = {"most": torch.tensor(100.0)}
        add(model[2], table)
        return lambda: table["most"]

    return build


def with_observer(hook_of):
    def build(model):
        observer = Observer()
        model[2].register_forward_hook(hook_of(observer))
        return lambda: observer.most

    return build


def with_tensor(hook_of):
    def build(model):
        most = torch.tensor(100.0)
        model[2].register_forward_hook(hook_of(most))
        return lambda: most

    return build


def with_global(model):
    TABLE["most"] = torch.tensor(100.0)
    model.insert(3, ScaledByGlobal().eval())
    return lambda: TABLE["most"]


def with_decorated(model):
    TABLE["most"] = torch.tensor(100.0)
    model[2].register_forward_hook(decorated)
    return lambda: TABLE["most"]


def with_foreign(model):
    model.insert(3, ScaledByForeign().eval())
    return lambda: model[3].observer.most


def with_list(model):
    seen = [torch.tensor(100.0)]
    model[2].register_forward_hook(growing(seen))
    return lambda: torch.stack(seen).amax()


KEEPERS = {
    "closure": with_table(
        lambda layer, table: layer.register_forward_hook(lambda *args: absmax(table, *args))
    ),
    "partial": with_table(lambda layer, table: layer.register_forward_hook(partial(absmax, table))),
    "in place": with_tensor(in_place),
    "by .data": with_tensor(by_data),
    "object": with_observer(lambda observer: observer),
    "method": with_observer(lambda observer: observer.method),
    "by setting .data": with_tensor(by_setting_data),
    "global": with_global,
    "decorated": with_decorated,
    "object of another package": with_foreign,
    "a list that grows": with_list,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


@pytest.fixture(params=KEEPERS)
def kept(request):
    """A model that computes with what its forwards leave outside of it, and what that is now."""
    model = prepared(network, ROWS)
    return model, KEEPERS[request.param](model)


def test_what_is_kept_stays_as_the_loop_leaves_it(kept):
    model, now = kept
    expected = samples(model, ROWS[:6], strategy="loop")
    assert now() == 100
    actual = samples(model, ROWS[:6])
    assert now() == 100 and way(model) == "loop"
    assert torch.equal(actual, expected)


def test_replicas_refuse_and_leave_it(kept):
    model, now = kept
    before = model(ROWS[:6])
    with pytest.raises(ValueError, match="an earlier one has left in a hook"):
        with bnuq.replicas(model, 3, 0):
            model(ROWS[:6])
    assert now() == 100
    assert torch.equal(model(ROWS[:6]), before)


def test_an_output_fn_that_keeps_what_it_computes_with_is_looped():
    model, table = prepared(network, ROWS), {"most": torch.tensor(100.0)}
    output_fn = partial(absmax, table, None, None)
    expected = samples(model, ROWS[:6], strategy="loop", output_fn=output_fn)
    assert torch.equal(samples(model, ROWS[:6], output_fn=output_fn), expected)
    assert table["most"] == 100 and way(model) == "loop"


def test_what_is_kept_and_not_computed_with_folds():
    model, taken, table = prepared(network, ROWS), {}, {}
    model[2].register_forward_hook(lambda module, args, out: taken.update(features=out))

    def scaled(module, args, out):
        return out * table.setdefault("scale", torch.tensor(2.0))  # made once, as a cache is

    model[3].register_forward_hook(scaled)
    expected = samples(model, ROWS[:6], strategy="loop")
    for _ in range(2):  # the first compares with replicas alone
        torch.testing.assert_close(samples(model, ROWS[:6]), expected, rtol=1e-5, atol=1e-5)
    assert len(taken["features"]) == 6 * len(expected)


@pytest.mark.parametrize("asks", [lambda kept: kept.shape[1:], Tensor.numel, len])
def test_a_shape_of_what_is_kept_may_be_asked_for(asks):
    model, taken = prepared(network, ROWS), {}

    def hook(module, args, out):
        if taken:
            asks(taken["features"])
        taken["features"] = out

    model[2].register_forward_hook(hook)
    samples(model, ROWS[:6])
    assert way(model) == "folded"


def bayesian():
    torch.manual_seed(0)
    return bnuq.to_bayesian(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)))


def step(model, num_samples=4):
    loss = bnuq.elbo_loss(
        model, ROWS[:6], torch.zeros(6, 1), num_samples=num_samples, likelihood="gaussian",
        batch_weight=0.1, seed=0,
    ).loss  # fmt: skip
    loss.backward()


def test_what_is_kept_in_training_alone():
    model, table = bayesian(), {"mean": torch.zeros(5)}

    def centred(module, args, out):
        if module.training:
            table["mean"] = 0.9 * table["mean"] + 0.1 * out.detach().mean(0)
        return out - table["mean"]

    model[0].register_forward_hook(centred)
    with pytest.raises(ValueError, match="an earlier one has left in a hook"):
        with bnuq.replicas(model, 4, 0):
            model(ROWS[:6])
    step(model)
    assert way(model) == "loop"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("of_all", [False, True])
def test_a_backward_hook_sees_one_sample_at_a_time(of_all):
    model, largest = bayesian(), []
    step(model)

    def note(module, of_input, of_output):
        if module is model[2]:
            largest.append((len(of_output[0]), of_output[0].abs().amax()))

    every = nn.modules.module.register_module_full_backward_hook
    handle = every(note) if of_all else model[2].register_full_backward_hook(note)
    try:
        step(model)
        with bnuq.replicas(model, 4, 0):
            with pytest.raises(ValueError, match="a backward hook of a module"):
                model(ROWS[:6])
    finally:
        handle.remove()
    assert [rows for rows, _ in largest] == 4 * [6]
    assert max(largest)[1] < 1  # of a mean over rows and samples, not of a trial
    with torch.no_grad(), bnuq.replicas(model, 4, 0):
        assert len(model(ROWS[:6])) == 24


class InTrainOnly(nn.Module):
    """Couples its rows in train() alone."""

    def __init__(self, couple):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.unused, self.couple = nn.Linear(6, 1), couple

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)))
        return self.last(self.couple(h) if self.training else h)


def branch(h):
    return 2 * h if h.mean() > 0 else h


def by_position(h):
    return h + 0.2 * torch.arange(len(h)).sin()[:, None]


@pytest.mark.parametrize("couple", [branch, by_position])
@pytest.mark.parametrize("num_samples", [2, 3])
def test_rows_that_meet_in_train_alone_are_refused_in_every_state(couple, num_samples):
    model = prepared(lambda: InTrainOnly(couple), ROWS).train()
    for _ in range(2 * num_samples):
        with pytest.raises(ValueError, match="replicas: model must give the same folded"):
            with bnuq.replicas(model, num_samples, 0):
                model(ROWS[:5])
        with torch.no_grad():
            model.first.weight.mul_(1.01)


@pytest.mark.parametrize("couple", [branch, by_position])
def test_samples_whose_rows_meet_in_train_alone_go_one_after_another(couple):
    torch.manual_seed(0)
    model = bnuq.to_bayesian(InTrainOnly(couple), rho_init=-2.0).train()
    model.norm = nn.Identity()
    for i in range(40):
        x = torch.randn(5 + i % 3, 8)
        y, options = torch.zeros(len(x), 4), {"likelihood": "gaussian", "batch_weight": 0.0}
        nll = bnuq.elbo_loss(model, x, y, num_samples=3, seed=i, **options).nll
        with torch.no_grad():
            outputs = []
            for t in range(3):
                with bnuq.replicas(model, 1, i, first_replica=t):
                    outputs.append(model(x))
            log_prob = torch.distributions.Normal(torch.stack(outputs), 1).log_prob(y)
            torch.testing.assert_close(nll, -log_prob.sum() / 3 / len(x), rtol=1e-5, atol=1e-5)
            model.first.weight_mu.mul_(1.01)
