"""Samples as one batch where train() draws random numbers: dropout may,
what rows share and other draws may not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import (
    D,
    K,
    N,
    Net,
    Residual,
    T,
    assert_right,
    data,
    gradients,
    proofs,
    step,
    ways,
)

import bnuq_ext as bnuq
from bnuq_ext import chain as chains

TINY = 1e-14  # of these probabilities a dropout drops nothing, but draws


class TrainOnly(nn.Module):
    """Couples the rows in train(), behind a dropout that in effect drops nothing."""

    def __init__(self, mix, p=TINY):
        super().__init__()
        self.dropout, self.mix = nn.Dropout(p), mix

    def forward(self, h):
        h = self.dropout(h)
        return self.mix(h) if self.training else h


COUPLINGS = {
    "the mean of the rows": lambda h: h - h.mean(0),
    "a tenth of a millionth of it": lambda h: h - 1e-7 * h.mean(0),
    "attention": lambda h: h + (h @ h.T).softmax(1) @ h,
    "the spread of the batch": lambda h: h * (1 + h.std()),
}


@pytest.mark.parametrize("mix", COUPLINGS.values(), ids=COUPLINGS)
def test_what_couples_rows_in_train_alone_goes_one_after_another(mix):
    model = Net(middle=TrainOnly(mix))
    for seed in range(3):
        assert_right(model, seed)
        step(model)
    assert ways(model) == {"loop"}


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_what_rare_values_would_set_off_in_train_alone(p):
    model = Net(middle=TrainOnly(lambda h: torch.where((h > 1e6).sum(0) > 27, 0, h), p))
    gradients(model, 0)
    assert ways(model) == {"loop"}
    with bnuq.replicas(model, T, 0), pytest.raises(ValueError, match="makes of the rows of all"):
        model(data()[0])


def test_a_coupling_that_begins_later_is_seen():
    """Of rows with the one before, which no operation of a trial shows."""
    share = torch.zeros((), dtype=torch.float64)
    couple = TrainOnly(lambda h: h - model.share * h[torch.arange(len(h)) - 1])
    model = Net(middle=couple)
    model.register_buffer("share", share)
    for seed in range(2):
        assert_right(model, seed)
        step(model)
    assert ways(model) == {"folded"}
    model.share.fill_(0.1)
    assert_right(model)
    assert ways(model) == {"loop"}


DRAWS = {
    "manifold mixup": lambda h: h[torch.randperm(len(h))],
    "noise of the batch": lambda h: h + torch.randn(()),
    "noise of each row": lambda h: h + torch.randn_like(h),
    "a shared mask": lambda h: h * torch.bernoulli(torch.full((9,), 0.5, dtype=h.dtype)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_other_random_numbers_are_drawn_one_sample_after_another(draw):
    model, drawn = Net(middle=TrainOnly(draw, 0.5)), []
    model.middle.register_forward_hook(lambda module, args, output: drawn.append(len(output)))
    for seed in range(3):
        drawn.clear()
        gradients(model, seed)
        assert drawn[-T:] == [N] * T
        step(model)
    assert ways(model) == {"loop"}


class Attending(nn.Module):
    """Attention within each row, with dropout of its weights."""

    def forward(self, h):
        q = h.view(len(h), 3, 3)
        p = 0.5 if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p).flatten(1)


class Encoder(nn.TransformerEncoderLayer):
    """Three tokens of three features in each row."""

    def __init__(self):
        super().__init__(3, 1, 5, dropout=0.5, batch_first=True, dtype=torch.float64)

    def forward(self, h):
        return super().forward(h.view(-1, 3, 3)).flatten(1)


DROPOUTS = {
    "dropout": lambda: nn.Dropout(0.5),
    "of channels": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 3)), nn.Dropout1d(0.5), nn.Flatten(1), Residual()
    ),
    "alpha": lambda: nn.Sequential(nn.AlphaDropout(0.5), Residual()),
    "of attention": Attending,
    "of a transformer": Encoder,
}


@pytest.mark.parametrize("make", DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_goes_together(make):
    model = Net(middle=make())
    for seed in range(3):
        gradients(model, seed)
        step(model)
    assert ways(model) == {"folded"}


class First(Net):
    """Dropout, or what it is told, before the first Bayesian layer."""

    def forward(self, x):
        return super().forward(self.mix(x))


def masks(seen):
    """The rows of masks, each a tuple."""
    return [tuple(row.tolist()) for row in (seen[-1] != 0)]


@pytest.mark.parametrize("num_samples", [2, T, 5])
@pytest.mark.parametrize("chain", [True, False])
def test_dropout_before_the_first_bayesian_layer_is_each_samples_own(
    chain, num_samples, monkeypatch
):
    wide = nn.Linear(D, 40, bias=False, dtype=torch.float64)
    layer, dropout = bnuq.BayesLinear(40, K, dtype=torch.float64), nn.Dropout(0.5)
    model = nn.Sequential(wide, dropout, layer)
    model = model if chain else nn.Sequential(model, nn.Flatten(1))
    seen = []
    if chain:  # which one with a hook is not
        run = chains.bayes_linear_chain
        see = lambda x, *a, **k: seen.append(x.detach().flatten(0, 1)) or run(x, *a, **k)  # noqa: E731
        monkeypatch.setattr(chains, "bayes_linear_chain", see)
    else:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    x, y = data()
    for i in range(3):
        seen.clear()
        loss = bnuq.elbo_loss(model, x, y, num_samples=num_samples, batch_weight=0.1, seed=i).loss
        loss.backward()
        if not chain and num_samples == 2:  # one after another
            seen = [torch.cat(seen[-2:])]
        found = masks(seen)
        assert len(found) == num_samples * N == len(set(found))
        assert not chain or len(seen) == 1
        step(model)


class Counting(nn.Dropout):
    """Changes itself in train()."""

    def __init__(self):
        super().__init__(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x)


class Recurrent(nn.LSTM):
    """Dropout that no function of Python's draws."""

    def __init__(self):
        super().__init__(40, 40, num_layers=2, dropout=0.5)

    def forward(self, x):
        return super().forward(x[None] * torch.arange(1, 41))[0][0]


FIRST = {"dropout": lambda: nn.Dropout(0.5), "counting": Counting, "recurrent": Recurrent}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", FIRST.values(), ids=FIRST)
def test_dropout_before_the_first_layer_in_replicas(make, grad):
    x = torch.ones(N, 40)
    torch.manual_seed(0)
    model = nn.Sequential(make(), bnuq.BayesLinear(40, 3, rho_init=-100.0), nn.Flatten(1))
    for _ in range(3):
        with torch.set_grad_enabled(grad), bnuq.replicas(model.train(), T, seed=0):
            out = model(x)
            assert len({tuple(row.tolist()) for row in out}) == T * N
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-3)
    with bnuq.replicas(model.eval(), T, seed=0):
        assert len(model(x)) == T * N


def test_replicas_take_a_mask_of_weights_and_what_needs_gradients_in_train():
    """As before a check of train() was there: a mask of weights is one of the call."""
    x, _ = data()

    def of_weights(h):
        return F.linear(h, F.dropout(torch.eye(9, dtype=h.dtype), 0.5))

    def its_gradient(h):
        torch.autograd.grad(h.sum(), h)
        return h

    for mix in (of_weights, its_gradient):
        model = Net(middle=TrainOnly(mix)).train()
        with bnuq.replicas(model, T, seed=0):
            assert len(model(x)) == T * N


@pytest.mark.parametrize("run", ["elbo", "replicas"])
def test_what_dropout_gives_is_the_forwards_own_to_write_into(run):
    class Noisy(Net):
        def forward(self, x):
            if self.training:
                x = F.dropout(x, 0.2)
                x.clamp_(0, 1)
            return super().forward(x)

    (x, y), model = data(), Noisy(middle=Residual()).train()
    before = x.clone()
    for _ in range(2):
        if run == "elbo":
            bnuq.elbo_loss(model, x, y, num_samples=T, batch_weight=0.1)
        else:
            with bnuq.replicas(model, T):
                model(x)
        assert torch.equal(x, before)


def test_a_recurrent_network_stands(monkeypatch):
    """Its layers hold their parameters once more, in a list."""

    class Recurrent(nn.GRU):
        def forward(self, h):
            return super().forward(h[None])[0][0]

    made = proofs(monkeypatch)
    model = Net(middle=Recurrent(9, 9, dtype=torch.float64))
    for seed in range(3):
        assert_right(model, seed)
        step(model)
    assert len(made) == 1 and ways(model) == {"folded"}


def test_replicas_refuse_a_coupling_in_train_alone():
    model = Net(middle=TrainOnly(COUPLINGS["the mean of the rows"])).eval()
    x, _ = data()
    with bnuq.replicas(model, T, seed=0):
        model(x)
        model.train()
        with pytest.raises(ValueError, match="model must give the same folded as one by one, got"):
            model(x)
        model.eval()
        model(x)


def test_replicas_take_noise_of_rows_and_models_that_change_themselves():
    """Neither can be compared with one replica alone."""
    x, _ = data()
    parametrizations = nn.utils.parametrizations
    spectral = parametrizations.spectral_norm(nn.Linear(9, 9, dtype=torch.float64))
    for middle in (TrainOnly(DRAWS["noise of each row"]), spectral):
        model = Net(middle=middle).train()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with bnuq.replicas(model, T, seed=0):
            assert len(model(x)) == T * N
        with torch.no_grad():  # the call has gone forward once
            model.load_state_dict(before)
            torch.manual_seed(0)
            with bnuq.replicas(model, T, seed=0):
                model(x)
            once = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(before)
            torch.manual_seed(0)
            with bnuq.replicas(model, T, seed=0):
                model(x)
        assert all(torch.equal(v, once[k]) for k, v in model.state_dict().items())


def test_replicas_that_tell_nothing_in_train_are_taken():
    """As where a head is zero in train() alone."""
    model = Net(middle=TrainOnly(lambda h: 0 * h)).train()
    with torch.no_grad():
        model.last.weight_rho.fill_(-100)
        model.last.bias_rho.fill_(-100)
    model.last.register_forward_hook(
        lambda module, args, output: 0 * output if model.training else None
    )
    x, _ = data()
    with bnuq.replicas(model, T, seed=0):
        assert (model(x) == 0).all()
