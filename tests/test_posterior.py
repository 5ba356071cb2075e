"""What is known of each weight, and pruning by it."""

import pytest
import torch
from test_bayes import predict, x
from torch import nn
from torch.nn.functional import softplus

import bnuq_ext as bnuq


def spread_out():
    torch.manual_seed(0)
    model = nn.Sequential(bnuq.BayesLinear(5, 8), nn.ReLU(), bnuq.BayesLinear(8, 3))
    with torch.no_grad():
        for m in (model[0], model[2]):
            m.weight_rho.uniform_(-4, 0)
    return model


def test_summary_lists_all_weights():
    model = spread_out()
    summary = bnuq.posterior_summary(model)
    mu = torch.cat([m.weight_mu.flatten() for m in (model[0], model[2])]).detach()
    std = softplus(torch.cat([m.weight_rho.flatten() for m in (model[0], model[2])])).detach()
    torch.testing.assert_close(summary.magnitude, mu.abs())
    torch.testing.assert_close(summary.std, std)
    torch.testing.assert_close(summary.snr, mu.abs() / std)
    assert summary.layers == {"0": slice(0, 40), "2": slice(40, 64)}


def test_weights_that_hardly_spread_are_ranked_by_their_ratio():
    layer = bnuq.BayesLinear(
        6, 1, bias=False
    )  # in float32 their sigmas are 0, the ratios nan and inf
    with torch.no_grad():
        layer.weight_mu.copy_(torch.tensor([[0.5, 0.0, 0.5, 0.1, 0.0, 0.3]]))
        layer.weight_rho.copy_(torch.tensor([[-120.0, -300, -110, -120, -1, -700]]))
    snr = bnuq.posterior_summary(layer).snr
    most = torch.finfo(torch.float32).max
    assert snr.dtype == torch.float32 and snr.tolist() == [most, 0, most, most, 0, most]
    bnuq.plots.signal_to_noise(snr)
    bnuq.prune(layer, 0.5)
    assert layer.weight_mask.tolist() == [[True, False, False, True, False, True]]


def test_weights_whose_spread_is_lost_to_float64_are_ranked_by_their_means():
    layer = bnuq.BayesLinear(4, 1, bias=False, rho_init=-800.0)
    with torch.no_grad():
        layer.weight_mu.copy_(torch.tensor([[0.4, -0.1, -0.3, 0.2]]))
    bnuq.prune(layer, 0.5)
    assert layer.weight_mask.tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("by", ["snr", "magnitude"])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.95, 1.0])
def test_pruned_weights_are_zero_in_every_sample(by, fraction):
    model = spread_out()
    summary = bnuq.posterior_summary(model)
    scores = getattr(summary, by)
    assert bnuq.prune(model, fraction, by) == pytest.approx(fraction, abs=0.5 / 64)
    kept = torch.cat([model[k].weight_mask.flatten() for k in (0, 2)])
    if kept.any() and not kept.all():
        assert scores[kept].min() >= scores[~kept].max()
    first = model[0]
    columns = predict(first, torch.eye(5), 20) - predict(first, torch.zeros(5, 5), 20)
    zero = ~first.weight_mask.T.expand(20, 5, 8)
    assert (columns[zero] == 0).all() and (columns[~zero] != 0).all()


def test_weights_of_equal_score_are_pruned_up_to_the_fraction():
    model = nn.Sequential(bnuq.BayesLinear(5, 8, mu_init=0.5), bnuq.BayesLinear(8, 3, mu_init=-0.5))
    assert bnuq.prune(model, 0.25) == 0.25
    assert sum(int((~layer.weight_mask).sum()) for layer in model) == 16


def test_pruning_is_reversible():
    model = spread_out()
    before = predict(model, x())
    bnuq.prune(model, 0.75)
    assert not torch.equal(predict(model, x()), before)
    bnuq.prune(model, 0.0)
    assert torch.equal(predict(model, x()), before)
    assert list(model.state_dict()) == list(spread_out().state_dict())


def test_masks_share_no_memory():
    """Savers that write each piece of memory once would leave out all masks but one."""
    model = spread_out()
    bnuq.prune(model, 0.5)
    masks = [model[k].weight_mask for k in (0, 2)]
    assert [m.untyped_storage().nbytes() for m in masks] == [m.numel() for m in masks]
    assert len({m.untyped_storage().data_ptr() for m in masks}) == 2


def assert_trains(model):
    y = torch.zeros(7, dtype=torch.long)
    bnuq.elbo_loss(model, x(), y, num_samples=2, batch_weight=0.1, seed=0).loss.backward()
    mask = model[0].weight_mask
    assert mask.dtype == torch.bool and (~mask).any()
    assert (model[0].weight_mu.grad[~mask] == 0).all()


def test_a_model_pruned_or_loaded_in_inference_mode_trains():
    model, other = spread_out(), spread_out()
    with torch.inference_mode():
        bnuq.prune(model, 0.5)
        other.load_state_dict(model.state_dict())
    assert_trains(model)
    assert_trains(other)


@pytest.mark.parametrize("assign", [True, False])
def test_a_mask_in_other_numbers_is_one_of_truth_values(assign):
    """As by a cast of a whole checkpoint."""
    model, other = spread_out(), spread_out()
    bnuq.prune(model, 0.5)
    checkpoint = {k: v.float() for k, v in model.state_dict().items()}
    other.load_state_dict(checkpoint, assign=assign)
    for p in other.parameters():
        p.requires_grad_()
    assert_trains(other)


def test_pruned_model_trains_and_keeps_its_zeros():
    model = spread_out()
    bnuq.prune(model, 0.5)
    y = torch.zeros(7, dtype=torch.long)
    out = bnuq.elbo_loss(model, x(), y, num_samples=2, batch_weight=0.1, seed=0)
    out.loss.backward()
    mask = model[0].weight_mask
    assert (model[0].weight_mu.grad[~mask] == 0).all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def diverged():
    model = spread_out()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = torch.nan
    return model


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: bnuq.prune(spread_out(), 1.5), r"prune: fraction must lie in \[0, 1\], got 1.5"),
        (lambda: bnuq.prune(spread_out(), 0.5, "size"), "prune: by must be one of snr, magnitude"),
        (
            lambda: bnuq.prune(nn.ReLU(), 0.5),
            "prune: model must contain a BayesLinear, got none; run bnuq_ext.to_bay",
        ),
        (
            lambda: bnuq.prune(diverged(), 0.5),
            "prune: model must have weights that can be ranked, got 1 that are nan",
        ),
        (lambda: bnuq.posterior_summary(nn.ReLU()), "posterior_summary: model must contain a"),
    ],
)
def test_prune_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mask_is_taken_off_weights_that_are_nan():
    model = spread_out()
    bnuq.prune(model, 0.5)
    with torch.no_grad():
        model[0].weight_mu.fill_(torch.nan)
    bnuq.prune(model, 0.0)
    assert model[0].weight_mask is None


def test_a_layer_shows_what_is_pruned():
    layer = bnuq.BayesLinear(8, 4, bias=False)
    shown = "8, 4, bias=False, prior=GaussianPrior(std=1.0), estimator='exact'"
    assert layer.extra_repr() == shown
    bnuq.prune(layer, 0.25)
    assert layer.extra_repr() == f"{shown}, pruned=25.0%"
    assert layer.to("meta").extra_repr() == shown
