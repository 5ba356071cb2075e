"""predict(..., sampler="batch", query="in"): each query's row counts in the statistics
that it meets."""

import copy

import pytest
import torch
import zoo
from predicting import DATA, X, equal, network, predict
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.query import JoiningForward

BATCHES = list(DATA[200:].split(8))
OPTIONS = {"sampler": "batch", "query": "in", "loader": BATCHES, "num_samples": 3}


def by_hand(original, x, batches, trained):
    """(T, N, ...): per batch and query a forward of the original, its named layers in train()."""
    original = copy.deepcopy(original).eval()
    for name in trained:
        layer = original.get_submodule(name)
        layer.training, layer.momentum = True, 0.0
    with torch.no_grad():
        return torch.stack(
            [
                torch.cat([original(torch.cat([b[:-1], x[i : i + 1]]))[-1:] for i in range(len(x))])
                for b in batches
            ]
        )


def names_of_norms(model):
    return [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def test_a_query_has_the_statistics_of_its_joint_batch(model):
    pred = predict(model, keep_samples=True, **OPTIONS)
    original = bnuq.revert(model)
    expected = by_hand(original, X, BATCHES[:3], names_of_norms(original))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-6)
    assert pred.snapshots is None and pred.num_samples == 3
    out = predict(model, keep_samples=True, **{**OPTIONS, "query": "out"})
    assert (pred.samples - out.samples).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name", ["mlp", "affine=False", "residual", "depthwise", "conv1d", "conv3d", "shared", "sync"]
)
def test_every_kind_of_network(name):
    original, x = zoo.network(name)
    batches = [torch.randn(5, *x.shape[1:]) for _ in range(2)]
    model = bnuq.convert(original)
    options = {"likelihood": "gaussian", "sampler": "batch", "loader": batches, "num_samples": 2}
    pred = bnuq.predict(model, x, query="in", keep_samples=True, **options)
    expected = by_hand(original, x, batches, names_of_norms(original))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pred.mean, expected.mean(0), rtol=1e-5, atol=1e-5)


def test_layers_left_out_have_running_statistics():
    torch.manual_seed(0)
    original = network(dropout=0.3)
    model = bnuq.convert(original, filter_fn=lambda name, module: name == "5")
    pred = predict(model, keep_samples=True, **OPTIONS)
    expected = by_hand(original, X, BATCHES[:3], ["5"])
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-6)


def test_a_loader_and_its_generators_are_as_before(model):
    """Its order and its workers' seeds come from them."""
    own = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(DATA[200:], batch_size=8, shuffle=True, generator=own)
    before = torch.get_rng_state(), own.get_state()
    first, second = (
        predict(model, X[:2], keep_samples=True, **{**OPTIONS, "loader": loader}) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(own.get_state(), before[1])
    assert torch.equal(first.samples, second.samples)


def test_replicas_have_global_numbers_and_a_loader_of_queries_the_same_batches(model):
    whole = predict(model, keep_samples=True, **{**OPTIONS, "num_samples": 5})
    options = {**OPTIONS, "num_samples": 3, "first_replica": 2}
    late = predict(model, keep_samples=True, **options)
    assert torch.equal(late.samples, whole.samples[2:])
    queries = [(x, torch.full((len(x),), i)) for i, x in enumerate(X.split(4))]
    pred = predict(model, queries, keep_samples=True, strategy="loop", **options)
    equal(pred, late)
    assert pred.targets.tolist() == [0] * 4 + [1] * 4 + [2]
    equal(predict(model, {"input": X}, keep_samples=True, **options), late)


def test_the_more_rows_the_less_a_query_counts(model):
    """Its own row moves the statistics by O(1/M)."""
    gap = {}
    for M in (8, 64):
        options = {"num_samples": 4, "sampler": "batch", "loader": list(DATA[16:].split(M))}
        both = [
            predict(model, query=query, keep_samples=True, **options).samples
            for query in ("in", "out")
        ]
        gap[M] = (both[0] - both[1]).square().mean().sqrt()
    assert 4 < gap[8] / gap[64] < 16


def test_leaves_model_bank_and_generators(model):
    model.train()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    bank = model[1].bank
    dataset = torch.utils.data.TensorDataset(DATA)
    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True)
    predict(model, **{**OPTIONS, "loader": loader})
    assert model.training and model[1].training and model[1].bank is bank
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_bayesian_layers_draw_as_with_the_query_out():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, affine=False)
    model = bnuq.convert(nn.Sequential(norm, bnuq.BayesLinear(4, 3, rho_init=-1.0)))
    x, batches = torch.randn(3, 4), list(torch.randn(2, 50, 4))
    options = {"likelihood": "gaussian", "seed": 4, "keep_samples": True}
    fresh = {"num_samples": 2, "sampler": "batch", "loader": batches, "query": "in"}
    pred = bnuq.predict(model, x, **fresh, **options)
    for t, batch in enumerate(batches):
        for i in range(3):
            joint = torch.cat([x[i : i + 1], batch[:-1]])
            mean, var = joint.mean(0, keepdim=True), joint.var(0, correction=0, keepdim=True)
            bnuq.attach(model, bnuq.Bank({"0": mean}, {"0": var}, 50, batch_size=50))
            stored = bnuq.predict(model, x[i : i + 1], num_samples=1, first_replica=t, **options)
            expected = stored.samples[0, 0]
            torch.testing.assert_close(pred.samples[t, i], expected, rtol=1e-4, atol=1e-5)


class Regularised(nn.Module):
    """Keeps the divergence of its weights at those of each forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = bnuq.BayesLinear(4, 3, rho_init=-1.0, prior=bnuq.ScaleMixturePrior())
        self.found = []

    def forward(self, x):
        self.found.append(bnuq.kl_divergence(self.last).item())
        return self.last(self.norm(x))


def test_a_divergence_in_the_forward_is_at_the_weights_of_the_replica():
    model = bnuq.convert(Regularised())
    options = {"likelihood": "gaussian", "seed": 4, "num_samples": 2}
    batches = list(torch.randn(2, 9, 4))
    bnuq.collect(model, batches, num_batches=2, progress=False)
    x = torch.randn(3, 4)
    model.found.clear()
    bnuq.predict(model, x, sampler="batch", loader=batches, query="in", **options)
    found = list(model.found)
    model.found.clear()
    bnuq.predict(model, x, strategy="loop", **options)
    first, second = model.found
    assert found == [first] * 3 + [second] * 3 and first != second


class Functional(nn.Module):
    """Half of its batch norm is a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return nn.functional.batch_norm(self.norm(x), torch.zeros(2), torch.ones(2)).flatten(1)


def test_batch_norm_that_is_not_covered_is_warned_of():
    with pytest.warns(UserWarning, match="predict: 1 batch-norm calls of the forward belong to no"):
        predict(bnuq.convert(Functional()), **OPTIONS)


def test_no_queries(model):
    assert predict(model, X[:0], **OPTIONS).mean.shape == (0, 5)


def test_batches_of_one_row_are_left_out(model):
    loader = [DATA[:1], DATA[:0], *BATCHES]
    with pytest.warns(UserWarning, match="predict: 2 of 5 batches were left out: they have fewer"):
        pred = predict(model, keep_samples=True, **{**OPTIONS, "loader": loader})
    equal(pred, predict(model, keep_samples=True, **OPTIONS))


class Uncalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return x.flatten(1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"query": "both"}, "query must be one of out, in, got 'both'"),
        ({"sampler": "bank", "loader": None}, 'query must be "out" with sampler "bank", got "in"'),
        ({"strategy": "folded"}, 'strategy must be "auto" or "loop" with query "in", got "folded"'),
        (
            {"loader": [X, torch.full_like(X, torch.nan), *[X] * 9]},
            "batch 1 must be finite, got NaN or infinity in the input",
        ),
        ({"num_samples": 99}, "loader must have 99 batches of 2 rows or more, got 25"),
        ({"x": (X, X)}, 'x must be one tensor with query "in", as a batch .* is, got 2 tensors'),
        ({"x": X[:, :1]}, r"loader must have rows like those of x, \[1, 6, 6\] torch.float32, got"),
        ({"x": X.double()}, r"torch.float64, got \[2, 6, 6\] torch.float32"),
        ({"output_fn": lambda o: o[:1]}, r"the output must have the 8 rows of query and batch"),
        ({"output_fn": lambda o: o.sum()}, r"the output must have the 8 rows of .* got \[\]"),
    ],
)
def test_rejects(model, options, message):
    options = dict(options)
    x = options.pop("x", X)
    with pytest.raises(ValueError, match=f"predict: .*{message}"):
        predict(model, x, **{**OPTIONS, **options})


@pytest.mark.parametrize("batch", [{"x": (X, X)}, ((X, X), torch.zeros(len(X)))], ids=type)
def test_rejects_batches_of_several_tensors(model, batch):
    text = 'predict: loader must yield one tensor a batch with query "in", got tuple'
    with pytest.raises(TypeError, match=text):
        predict(model, X, **{**OPTIONS, "loader": [batch] * 9})


def test_rejects_layers_of_a_single_row():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(72)

        def forward(self, x):
            x = x.flatten(1)
            return x[:, :5] + self.norm(x.mean(0, keepdim=True))[:, :5]

    text = r"predict: model must give 'norm' two values a channel with .* got \[1, 72\]"
    with pytest.raises(ValueError, match=text):
        predict(bnuq.convert(Pooled()), **OPTIONS)


def test_rejects_models_without_stochastic_calls():
    with pytest.raises(ValueError, match="predict: model must call a stochastic layer in its forw"):
        predict(bnuq.convert(Uncalled()), **OPTIONS)
    bayes = nn.Sequential(nn.Flatten(), bnuq.BayesLinear(72, 3))
    with pytest.raises(ValueError, match="predict: model must contain stochastic batch-norm lay"):
        predict(bayes, **OPTIONS)


def test_a_query_keeps_its_own_row_alone(model, monkeypatch):
    kept, joined = [], JoiningForward._joined
    monkeypatch.setattr(
        JoiningForward, "_joined", lambda *args: kept.append(joined(*args)) or kept[-1]
    )
    predict(model, **OPTIONS)
    assert {output.untyped_storage().nbytes() for output in kept} == {4 * 5}
