"""Known traps of batch norm: what is warned of, what has a switch, and what simply works."""

import copy

import pytest
import torch
from predicting import DATA, X, make_model, predict
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn
from torch.utils.data import TensorDataset

import bnuq_ext as bnuq

ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def warnings_of(model, x=ROWS):
    return bnuq.doctor(model, x).warnings


def block(*between):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), *between, nn.Linear(6, 3)).eval()


# Order of batch norm, activation and dropout.


@pytest.mark.parametrize("norm_first", [True, False])
def test_batch_norm_before_and_after_the_nonlinearity(norm_first):
    torch.manual_seed(0)
    pair = [nn.BatchNorm1d(6), nn.ReLU()]
    model = bnuq.convert(nn.Sequential(nn.Linear(4, 6), *pair[:: 1 if norm_first else -1]))
    batches = list(torch.randn(5, 16, 4))
    bnuq.collect(model, batches, 5, progress=False)
    pred = bnuq.predict(model, ROWS, likelihood="gaussian", num_samples=5, keep_samples=True)
    for t, s in enumerate(pred.snapshots):
        h, hidden = (F.linear(v, model[0].weight, model[0].bias) for v in (batches[s], ROWS))
        if not norm_first:
            h, hidden = h.relu(), hidden.relu()
        expected = (hidden - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        expected = expected.relu() if norm_first else expected
        torch.testing.assert_close(pred.samples[t], expected.detach(), rtol=1e-4, atol=1e-5)


def test_dropout_before_batch_norm_is_warned_of():
    for dropout in (nn.Dropout(0.1), nn.AlphaDropout(0.1)):
        behind = block(nn.ReLU(), dropout, nn.Linear(6, 6), nn.BatchNorm1d(6))
        for model in (behind, bnuq.convert(behind)):
            (warning,) = warnings_of(model)
            assert warning.startswith("batch norm after dropout: 5. Dropout changes the variance")
            assert f"  warning: {warning}" in str(bnuq.doctor(model, ROWS))


def test_dropout_behind_batch_norm_or_without_probability_is_not():
    for model in (
        block(nn.ReLU(), nn.Dropout(0.5)),
        block(nn.Dropout(0.0), nn.BatchNorm1d(6)),
    ):
        assert warnings_of(model) == ()


class Branches(nn.Module):
    """Dropout in one branch, which runs before the other branch's batch norm."""

    def __init__(self, joined):
        super().__init__()
        self.drop, self.joined = nn.Dropout(0.5), joined
        self.norm, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x):
        left = self.drop(x) * 2
        right = self.norm(x)
        return self.last(left + right) if self.joined else left + self.last(right)


def test_the_way_of_the_data_counts_not_the_order_of_the_calls():
    assert warnings_of(Branches(joined=False).eval()) == ()
    (warning,) = warnings_of(Branches(joined=True).eval())
    assert "after dropout: last." in warning


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        left, right = F.dropout(x, training=self.training).chunk(2, 1)
        return self.norm(torch.cat(tensors=[right, left], dim=1))


def test_dropout_is_followed_through_parts_and_names():
    (warning,) = warnings_of(Parts().eval())
    assert "after dropout: norm." in warning


def test_many_layers_and_layers_without_a_name_are_listed_in_short():
    layers = [nn.BatchNorm1d(4) for _ in range(6)]
    (warning,) = warnings_of(nn.Sequential(nn.Dropout(), *layers).eval())
    assert "after dropout: 1, 2, 3, 4 and 2 more. Dropout" in warning
    nameless = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    (warning,) = warnings_of(nn.Sequential(nn.Dropout(), nameless).eval())
    assert "after dropout: one without parameters. Dropout" in warning


# Frozen, or in eval.


def test_batch_norm_in_train_is_warned_of():
    model = bnuq.convert(block()).requires_grad_(False)
    assert warnings_of(model) == ()
    model.train()
    (warning,) = warnings_of(model)
    assert warning.startswith("batch norm in train(): 1. Outside predict a forward")
    before = model[1].running_mean.clone()
    with torch.no_grad():  # what the warning says: neither of the two stops it
        model(ROWS)
    assert not torch.equal(model[1].running_mean, before)
    assert model[1].training and model[0].training


def test_batch_norm_that_was_left_out_is_warned_of_too():
    model = nn.Sequential(block(), nn.BatchNorm1d(3)).eval()
    model = bnuq.convert(model, filter_fn=lambda name, module: name == "0.1")
    model[1].train()
    (warning,) = warnings_of(model)
    assert warning.startswith("batch norm in train(): 1. ")


def test_frozen_statistics_normalise_in_train_and_do_not_move():
    model = bnuq.convert(block())
    model[1].running_mean.uniform_(-1, 1)
    expected, state = model(ROWS), copy.deepcopy(model.state_dict())
    bnuq.freeze(model)
    assert torch.equal(model.train()(ROWS), expected) and warnings_of(model) == ()
    model(ROWS).sum().backward()
    assert model[1].weight.grad is None and model[0].weight.grad is not None
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training and model[0].training and not model[1].training


def test_statistics_are_frozen_at_once_in_a_model_that_trains():
    model = bnuq.convert(block()).train()
    expected = copy.deepcopy(model).eval()(ROWS)
    before = model[1].running_mean.clone()
    bnuq.freeze(model)
    torch.testing.assert_close(model(ROWS), expected)
    assert torch.equal(model[1].running_mean, before)


def test_the_switches_are_separate_and_can_be_undone():
    for statistics in (True, False):
        for affine in (True, False):
            model = bnuq.convert(block()).train()
            bnuq.freeze(model, statistics=statistics, affine=affine)
            before = model[1].running_mean.clone()
            model.train()(ROWS).sum().backward()
            assert torch.equal(model[1].running_mean, before) == statistics
            assert (model[1].weight.grad is None) == affine
    bnuq.freeze(model)
    bnuq.freeze(model, statistics=False, affine=False)
    plain = block().train()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.train()(ROWS), plain(ROWS))
    assert model[1].weight.requires_grad and model[1].training


def test_update_bn_leaves_frozen_statistics_and_estimates_others():
    model = bnuq.convert(block())
    model(ROWS)
    model[1].running_mean.uniform_(-1, 1)
    state, batches = copy.deepcopy(model.state_dict()), list(ROWS.split(4))
    bnuq.freeze(model)
    update_bn(batches, model)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    bnuq.freeze(model, statistics=False)
    update_bn(batches, model)
    means = torch.stack([model[0](rows).mean(0) for rows in batches])
    torch.testing.assert_close(model[1].running_mean, means.mean(0).detach())


def test_a_layer_in_eval_stays_there_when_it_is_let_go():
    model = bnuq.convert(block()).eval()
    bnuq.freeze(model)
    bnuq.freeze(model, statistics=False)
    expected, before = model(ROWS), model[1].running_mean.clone()
    assert not model[1].training
    assert torch.equal(model(ROWS), expected) and torch.equal(model[1].running_mean, before)


def test_a_layer_that_is_turned_back_is_frozen_no_more():
    model = bnuq.convert(block())
    bnuq.freeze(model)
    with pytest.raises(UserWarning, match="^revert: '1': frozen"):  # an error: as in these tests
        bnuq.revert(model, inplace=True)
    assert type(model[1]) is bnuq.StochasticBatchNorm1d and model[1].frozen
    with pytest.warns(UserWarning, match="^revert: '1': frozen, but torch's batch norm moves its"):
        model = bnuq.convert(bnuq.revert(model)).train()
    before = model[1].running_mean.clone()
    model(ROWS)
    assert model[1].training and not torch.equal(model[1].running_mean, before)


def test_what_predict_normalises_with_is_another_switch():
    model = make_model()
    expected = predict(model)
    bnuq.freeze(model)
    model.train()
    assert torch.equal(predict(model).mean, expected.mean)
    again = make_model()
    bnuq.freeze(again)
    bnuq.collect(again, TensorDataset(DATA), 4, batch_size=16, progress=False)
    assert predict(again, num_samples=4).mutual_information.max() > 1e-4
    frozen = copy.deepcopy(again).train()
    assert not frozen[1].training
    with pytest.warns(UserWarning, match="^revert: '1', '5': frozen"):
        reverted = bnuq.revert(frozen).train()
    assert reverted[1].training and type(reverted[1]) is nn.BatchNorm2d


def test_freeze_rejects():
    with pytest.raises(ValueError, match="freeze: model must contain stochastic batch-norm layers"):
        bnuq.freeze(block())
    with pytest.raises(TypeError, match="freeze: model must be a torch.nn.Module, got str"):
        bnuq.freeze("model")


# Small batches.


@pytest.mark.parametrize("rows, small", [(8, True), (16, True), (17, False)])
def test_a_bank_of_small_batches_is_warned_of(rows, small):
    model = make_model()
    model[3].p = 0.0
    bnuq.collect(model, TensorDataset(DATA), 4, batch_size=rows, progress=False)
    found = warnings_of(model, X)
    assert len(found) == small
    if small:
        assert found[0].startswith(f"small batches: the bank's have {rows} rows. With 16 or fewer")


# A bank of another state.


ABOVE = (DATA + 1).flatten(1)


def trained(model, steps):
    """Learns lengths of rows, and goes on from where it is."""
    optimizer = torch.optim.Adam(model.train().parameters(), 0.01)
    for rows in torch.randint(len(ABOVE), (steps, 32)):
        optimizer.zero_grad()
        F.mse_loss(model(ABOVE[rows]), ABOVE[rows].norm(dim=1, keepdim=True)).backward()
        optimizer.step()
    return model.eval()


def collected(model):
    return bnuq.collect(model, TensorDataset(ABOVE), 8, batch_size=32, progress=False)


def test_a_bank_of_another_state_is_warned_of():
    torch.manual_seed(0)
    layers = nn.Linear(72, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    model = bnuq.convert(nn.Sequential(*layers))
    other = copy.deepcopy(model)
    early = collected(trained(model, 150))
    assert warnings_of(model, ABOVE) == ()
    trained(model, 1000)
    other[0].reset_parameters()
    for bank in (early, collected(trained(other, 150))):
        bnuq.attach(model, bank)
        (warning,) = warnings_of(model, ABOVE)
        assert warning.startswith("bank far from the running statistics: 1. It is of other data")
    collected(model)
    assert warnings_of(model, ABOVE) == ()
    bnuq.attach(model, early)
    model[1].reset_running_stats()  # which have then seen no data
    assert warnings_of(model, ABOVE) == ()


# Recurrent networks, and several devices.


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        for _ in range(3):
            x = x + self.norm(self.cell(x)).relu()
        return x


def test_every_time_step_has_statistics_of_its_own():
    torch.manual_seed(0)
    model = bnuq.convert(Recurrent()).eval()
    batches = list(torch.randn(4, 16, 4))
    bank = bnuq.collect(model, batches, 4, progress=False)
    assert bank.names == ("norm", "norm#1", "norm#2")
    x, reference = batches[0], model.cell
    with torch.no_grad():
        for key in bank.names:
            h = reference(x)
            torch.testing.assert_close(bank.mean[key][0], h.mean(0), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(
                bank.var[key][0], h.var(0, correction=0), rtol=1e-4, atol=1e-6
            )
            x = x + ((h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()).relu()


def test_synchronised_batch_norm_has_the_statistics_of_this_process():
    model = bnuq.convert(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
    batch = torch.randn(16, 4)
    bank = bnuq.collect(model, [batch], 1, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(bank.mean["1"][0], model[0](batch).mean(0))


def test_layers_show_that_they_are_frozen():
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    before = repr(model)
    bnuq.freeze(model, affine=False)
    assert model[0].extra_repr() == f"{nn.BatchNorm1d(4).extra_repr()}, frozen=True"
    bnuq.freeze(model, statistics=False)
    assert repr(model) == before
