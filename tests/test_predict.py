"""predict: one answer under every chunk and strategy, for every kind of input."""

import copy

import pytest
import torch
from predicting import DATA, SAMPLERS, X, equal, predict
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import reference


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chunks_and_strategies_agree(model, sampler):
    loop = predict(model, sampler=sampler, strategy="loop", keep_samples=True)
    assert loop.samples.std(0).mean() > 1e-3
    for options in (
        {}, {"strategy": "folded"}, {"chunk": 1}, {"chunk": 7}, {"chunk": 100}, {"chunk": 3, "strategy": "folded"}
    ):  # fmt: skip
        equal(predict(model, sampler=sampler, keep_samples=True, **options), loop)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("strategy", ["loop", "folded"])
def test_replicas_have_global_numbers(model, sampler, strategy):
    options = {"sampler": sampler, "strategy": strategy, "keep_samples": True}
    whole = predict(model, **options)
    half = predict(model, num_samples=10, first_replica=10, **options)
    torch.testing.assert_close(half.samples, whole.samples[10:], rtol=1e-5, atol=1e-6)
    if sampler == "bank":
        assert torch.equal(half.snapshots, whole.snapshots[10:])


def test_statistics_are_those_of_the_samples(model):
    pred = predict(model, keep_samples=True)
    mean, variance, entropy, expected = reference.predictive_statistics(pred.samples.double())
    torch.testing.assert_close(pred.mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pred.variance.double(), variance, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(pred.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    information = pred.mutual_information.double()
    torch.testing.assert_close(information, entropy - expected, rtol=1e-3, atol=1e-5)
    assert pred.num_samples == 20 and pred.likelihood == "categorical"
    assert pred.noise_var is pred.total_variance is pred.targets is None


def test_gaussian_statistics(model):
    noise = torch.rand(9, 5)
    for chunk in ("auto", 6):
        pred = predict(
            model, likelihood="gaussian", noise_var=noise, keep_samples=True, chunk=chunk
        )
        samples = pred.samples.double()
        torch.testing.assert_close(pred.mean.double(), samples.mean(0), rtol=1e-5, atol=1e-6)
        variance = samples.var(0, correction=0)
        torch.testing.assert_close(pred.variance.double(), variance, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(pred.total_variance, pred.variance + noise)
        assert pred.entropy is pred.mutual_information is None
    bare = predict(model, likelihood="gaussian")
    assert torch.equal(bare.total_variance, bare.variance) and bare.samples is None


def test_a_seed_is_the_same_draws_and_none_is_torchs_generator(model):
    assert torch.equal(predict(model).mean, predict(model).mean)
    assert not torch.equal(predict(model, seed=4).mean, predict(model).mean)
    for seed in (-(2**63), 2**63 - 1, -1, 0):
        assert predict(model, seed=seed, num_samples=2).mean.isfinite().all()
    torch.manual_seed(1)
    one, other = predict(model, seed=None), predict(model, seed=None)
    torch.manual_seed(1)
    assert torch.equal(predict(model, seed=None).mean, one.mean)
    assert not torch.equal(one.mean, other.mean)


def test_more_replicas_than_snapshots(model):
    pred = predict(model, num_samples=50, strategy="folded")
    counts = pred.snapshots.bincount(minlength=24)
    assert counts.min() == 2 and counts.max() == 3


def test_dense_outputs():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)
    )
    model = bnuq.convert(net)
    bnuq.collect(model, torch.utils.data.TensorDataset(DATA), 8, batch_size=16, progress=False)
    pred = predict(model, keep_samples=True)
    assert pred.mean.shape == (9, 4, 6, 6) and pred.mutual_information.shape == (9, 6, 6)
    torch.testing.assert_close(pred.mean.sum(1), torch.ones(9, 6, 6))
    nhwc = predict(model, X.to(memory_format=torch.channels_last), keep_samples=True)
    equal(nhwc, pred)


def test_tuples_and_dicts_of_inputs(flexible):
    x, scale = torch.randn(6, 4), torch.rand(6, 1)
    options = {"output_fn": lambda out: out["logits"], "keep_samples": True}
    both = predict(flexible, (x, scale), **options)
    equal(predict(flexible, (x, scale), strategy="loop", **options), both)
    equal(predict(flexible, {"x": x, "scale": scale}, **options), both)
    one = predict(flexible, (x,), **options)
    equal(predict(flexible, x, **options), one)
    flipped = predict(flexible, {"x": x, "flip": True}, **options)
    equal(predict(flexible, {"x": x, "flip": True}, strategy="loop", **options), flipped)
    assert not torch.allclose(flipped.mean, one.mean)
    # The input bypasses the norm here: a scale of (6, 1) meets folded rows only when expanded.
    assert predict(flexible, (x, scale), strategy="folded", **options).mean.shape == (6, 3)


def test_loaders(model):
    labels = torch.arange(40)
    dataset = torch.utils.data.TensorDataset(DATA[:40], labels)
    loader = torch.utils.data.DataLoader(dataset, 16)
    whole = predict(model, DATA[:40], keep_samples=True)
    pred = predict(model, loader, keep_samples=True)
    equal(pred, whole)
    assert torch.equal(pred.targets, labels) and torch.equal(pred.snapshots, whole.snapshots)
    batches = DATA[:40].split(16)
    equal(predict(model, batches.__iter__(), keep_samples=True), whole)
    equal(predict(model, list(batches), keep_samples=True), whole)
    dicts = [{"x": b, "y": i} for i, b in enumerate(batches)]
    pred = predict(model, dicts, keep_samples=True)
    equal(pred, whole)
    assert pred.targets == [0, 1, 2]
    dicts = [
        {"x": -b, "y": -1, "input": b, "target": torch.tensor(i)} for i, b in enumerate(batches)
    ]
    pred = predict(model, dicts, keep_samples=True)
    equal(pred, whole)
    assert list(map(int, pred.targets)) == [0, 1, 2]
    keys = ["targets", "label", "labels"]
    dicts = [{"x": b, k: i} for i, (b, k) in enumerate(zip(batches, keys, strict=True))]
    assert predict(model, dicts).targets == [0, 1, 2]
    assert predict(model, [{"label": 1, "y": 0, "x": b} for b in batches]).targets == [0, 0, 0]
    mixed = [(b, i) if i else b for i, b in enumerate(batches)]
    assert predict(model, mixed).targets == [None, 1, 2]
    pred = predict(model, [((b,), 1, "c") for b in batches], keep_samples=True)
    equal(pred, whole)
    assert pred.targets == [1, 1, 1]
    assert predict(model, [(b,) for b in batches]).targets is None
    padded = [(b, torch.zeros(len(b), 2 + i)) for i, b in enumerate(batches)]
    targets = predict(model, padded).targets
    assert [list(target.shape) for target in targets] == [[16, 2], [16, 3], [8, 4]]
    numbers = [(b, torch.tensor(i)) for i, b in enumerate(batches)]
    assert [target.item() for target in predict(model, numbers).targets] == [0, 1, 2]
    dtypes = torch.float32, torch.int64, torch.float32
    kinds = [(b, torch.zeros(len(b), dtype=d)) for b, d in zip(batches, dtypes, strict=True)]
    assert tuple(target.dtype for target in predict(model, kinds).targets) == dtypes


def test_a_loader_with_outputs_of_several_shapes_is_refused():
    model = bnuq.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    images = [torch.randn(4, 3, 8, 8), torch.randn(2, 3, 8, 6)]
    bnuq.collect(model, images)
    with pytest.raises(
        ValueError,
        match=r"predict: x must yield batches with outputs of one shape, .* got \[2, 4, 6, 4\]",
    ):
        predict(model, images)


def test_a_loader_with_outputs_of_several_numbers_of_classes_is_refused(model):
    classes = iter((3, 2))
    options = {"output_fn": lambda out: out[:, : next(classes)], "num_samples": 1}
    with pytest.raises(ValueError, match=r"outputs of one shape, .* got \[9, 2\]$"):
        predict(model, [X, X], **options)


def test_batch_sampler_uses_the_loaders_batches_in_their_order(model):
    bank = {name: m.bank for name, m in model.named_modules() if hasattr(m, "bank")}
    batches = list(DATA[:160].split(16))
    pred = predict(model, sampler="batch", loader=batches, num_samples=4, keep_samples=True)
    other = copy.deepcopy(model)
    bnuq.collect(other, batches, 4, progress=False)
    for t in range(4):
        one = copy.deepcopy(other)
        single = bnuq.collect(one, batches[t : t + 1], 1, progress=False)
        expected = predict(one, num_samples=1, keep_samples=True)
        torch.testing.assert_close(pred.samples[t], expected.samples[0], rtol=1e-5, atol=1e-6)
        assert len(single) == 1
    late = predict(
        model, sampler="batch", loader=batches, num_samples=2, first_replica=2, keep_samples=True
    )
    torch.testing.assert_close(late.samples, pred.samples[2:], rtol=1e-5, atol=1e-6)
    assert pred.snapshots is None
    assert bank == {name: m.bank for name, m in model.named_modules() if hasattr(m, "bank")}
    with pytest.raises(ValueError, match="predict: loader must have 11 batches of use, got 10"):
        predict(model, sampler="batch", loader=batches, num_samples=11)


def test_batch_sampler_goes_on_after_batches_too_small_to_use(model):
    batches = list(DATA[:64].split(16))
    expected = predict(model, sampler="batch", loader=batches, num_samples=4, keep_samples=True)
    text = "predict: 1 of 5 batches were left out: they have fewer than two"
    with pytest.warns(UserWarning, match=text):
        loader = [batches[0], DATA[:0], *batches[1:], None]
        pred = predict(model, sampler="batch", loader=loader, num_samples=4, keep_samples=True)
    equal(pred, expected)


def test_fresh_batches_may_be_dicts_with_targets(flexible):
    batches = list(torch.randn(4, 16, 4))
    options = dict(sampler="batch", num_samples=4, output_fn=lambda o: o["logits"])
    pairs = [({"x": x, "scale": torch.ones(16, 1)}, torch.zeros(16)) for x in batches]
    equal(
        predict(flexible, batches[0], loader=pairs, **options),
        predict(flexible, batches[0], loader=batches, **options),
    )


def test_batch_sampler_of_a_loader_whose_last_batch_is_one_row():
    norm = bnuq.convert(nn.BatchNorm1d(4))
    data = torch.utils.data.TensorDataset(torch.randn(161, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    options = {"likelihood": "gaussian", "num_samples": 25, "sampler": "batch"}
    with pytest.warns(UserWarning, match="predict: 2 of 27 batches were left out"):
        pred = bnuq.predict(norm, torch.randn(3, 4), loader=loader, keep_samples=True, **options)
    assert len(pred.samples.unique(dim=0)) == 25


def test_no_rows_and_one_row(model):
    for strategy in ("auto", "folded", "loop"):
        assert predict(model, X[:0], strategy=strategy).mean.shape == (0, 5)
    one = predict(model, X[:1], keep_samples=True)
    torch.testing.assert_close(one.samples, predict(model, keep_samples=True).samples[:, :1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [predict, bnuq.plug_in], ids=["predict", "plug_in"])
def test_a_compiled_function_breaks_its_graph_around_it(model, call):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(x):
        options = {} if call is predict else {"likelihood": "categorical"}
        return call(model, 2 * x, **options).mean + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    for rows in (X, X[:4]):
        torch.testing.assert_close(compiled(rows), function(rows))
    nodes = {node.target for graph in graphs for node in graph.graph.nodes}
    assert graphs and not any("bnuq" in str(target) for target in nodes)


def test_a_compiled_model_is_unwrapped(model):
    compiled = torch.compile(model, backend="eager")
    equal(predict(compiled), predict(model))


def test_a_part_of_a_model(model):
    part = model[:6]
    pred = bnuq.predict(part, X, likelihood="gaussian", num_samples=20, seed=3, keep_samples=True)
    head = nn.Sequential(*model[6:])
    whole = predict(model, keep_samples=True)
    torch.testing.assert_close(head(pred.samples[4]), whole.samples[4], rtol=1e-5, atol=1e-5)
    options = {"likelihood": "gaussian", "num_samples": 20, "seed": 3, "keep_samples": True}
    for strategy in ("auto", "loop"):  # without the second of the bank's layers
        first = bnuq.predict(model[:3], X, strategy=strategy, **options)
        mean, var = (s["1"][first.snapshots[4]][:, None, None] for s in bank_of(model))
        expected = ((model[0](X) - mean) / (var + 1e-5).sqrt()).relu()
        torch.testing.assert_close(first.samples[4], expected.detach(), rtol=1e-5, atol=1e-5)


class TwoNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x)], 1)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_part_draws_what_the_whole_does(sampler, strategy):
    torch.manual_seed(0)
    model, data = bnuq.convert(TwoNorms().eval()), torch.randn(64, 6)
    bnuq.collect(model, list(data.split(8)), 8, progress=False)
    options = {"sampler": sampler, "strategy": strategy, "keep_samples": True}
    whole = predict(model, data[:5], **options).samples
    for part, columns in ((model.first, slice(6)), (model.second, slice(6, 12))):
        samples = predict(part, data[:5], **options).samples
        torch.testing.assert_close(samples, whole[:, :, columns], rtol=1e-5, atol=1e-6)
    assert (whole[:, :, :6] - whole[:, :, 6:]).abs().mean() > 0.01 or sampler in ("bank", "joint")
    model.first = nn.Identity()
    with pytest.warns(UserWarning, match="no longer has the layers first"):
        rest = predict(model, data[:5], **options).samples
    torch.testing.assert_close(rest[:, :, 6:], whole[:, :, 6:], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model.second.weight.mul_(2)
    predict(model, data[:5], **options)  # said once, whatever the weights are


def test_a_wrapper_around_a_part_takes_no_layer_out():
    torch.manual_seed(0)
    model, data = bnuq.convert(TwoNorms().eval()), torch.randn(64, 6)
    bnuq.collect(model, list(data.split(8)), 8, progress=False)
    before = predict(model, data[:5], keep_samples=True).samples
    model.first = nn.Sequential(model.first)  # another name; warnings are errors
    after = predict(model, data[:5], keep_samples=True).samples
    torch.testing.assert_close(after, before)


def bank_of(model):
    return model[1].bank.mean, model[1].bank.var


def test_single_rows_of_sizes_that_always_differ_go_one_after_another():
    """Clips of sound: a trial costs more than it saves, but for the first two sizes
    and those that come again and again."""
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    model = bnuq.convert(nn.Sequential(*layers).eval())
    bnuq.collect(model, [torch.randn(20, 1, 30) for _ in range(8)], progress=False)
    rows = []
    model.register_forward_hook(lambda module, args, out: rows.append(len(out)))

    def forwards(size, **options):
        rows.clear()
        x = torch.randn(1, 1, size)
        bnuq.predict(model, x, likelihood="gaussian", num_samples=8, seed=0, **options)
        return rows[:]

    for size in (30, 31):
        assert len(forwards(size)) > 10 and forwards(size) == [8]
    for size in range(32, 40):
        assert forwards(size) == [1] * 8
    assert forwards(40, strategy="folded")[-1] == 1 and forwards(40) == [8]
    rows.clear()
    bnuq.predict(model, torch.randn(2, 1, 30), likelihood="gaussian", num_samples=8, seed=0)
    assert rows[-1] == 2 and 16 in rows  # of a size that was tried: four replicas alone
    for _ in range(4):
        assert forwards(32) == [1] * 8
    assert len(forwards(32)) > 10 and forwards(32) == [8]
