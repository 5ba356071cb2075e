import copy
import pickle
import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from zoo import ZOO, Residual, Shared, assert_same, classes, mlp, network, step

import bnuq_ext as bnuq
from bnuq_ext.nn import STOCHASTIC_CLASSES, named_stochastic_layers

zoo = pytest.mark.parametrize("name", ZOO)


# ---- outside a pass: the original


class Rebuilt(nn.Module):
    """Copies itself into train(), and does something else there,
    as torchvision's feature extractors."""

    def __init__(self):
        super().__init__()
        self.inner, self.doubled = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), True

    def train(self, mode=True):
        self.doubled = mode
        return super().train(mode)

    def forward(self, x):
        return self.inner(x) * (2 if self.doubled else 1)

    def __deepcopy__(self, memo):
        made = Rebuilt()
        memo[id(self)] = made
        made.inner = copy.deepcopy(self.inner, memo)
        return made.train()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [bnuq.convert, bnuq.to_bayesian])
def test_the_copy_has_the_training_flags(training, change):
    model = nn.Sequential(Rebuilt(), nn.ReLU()).train(training)
    model[0].inner[0].train(not training)
    made = change(model)
    assert [m.training for m in made.modules()] == [m.training for m in model.modules()]
    assert made[0].doubled == training
    if change is bnuq.convert:
        assert [m.training for m in bnuq.revert(made).modules()] == [
            m.training for m in model.modules()
        ]


@zoo
@pytest.mark.parametrize("training", [True, False])
def test_behaves_as_the_original(name, training):
    model, x = network(name)
    converted = bnuq.convert(model)
    for _ in range(2):
        expected = step(model.train(training), x)
        assert_same(step(converted.train(training), x), expected)


def names(model):  # a copied graph has a class of its own, of the same name
    return {name: cls.__qualname__ for name, cls in classes(model).items()}


@zoo
def test_every_batch_norm_has_its_class_and_revert_gives_it_back(name):
    model, x = network(name)
    before = names(model)
    converted = bnuq.convert(model)
    assert names(converted) == {
        n: f"Stochastic{c}" if re.search(r"Norm(\dd)?$", c) else c for n, c in before.items()
    }
    assert names(model) == before
    reverted = bnuq.revert(converted)
    assert not named_stochastic_layers(reverted) and named_stochastic_layers(converted)
    assert_same(step(reverted.eval(), x), step(model.eval(), x))


@zoo
def test_checkpoints_load_both_ways(name):
    model, _ = network(name)
    converted = bnuq.convert(model)
    assert list(converted.state_dict()) == list(model.state_dict())
    for source, target in [(model, converted), (converted, model)]:
        with torch.no_grad():
            for value in source.state_dict().values():
                value.add_(1)
        target.load_state_dict(source.state_dict())
        assert_same(dict(target.state_dict()), dict(source.state_dict()))


def test_loads_checkpoints_from_before_num_batches_tracked():
    model, _ = network("mlp")
    old = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    bnuq.convert(mlp()).load_state_dict(old)  # without metadata, as torch 0.4 wrote it


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.double(),
        lambda m: m.half().float(),
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: m.to(memory_format=torch.channels_last),
    ],
    ids=["deepcopy", "pickle", "double", "half", "bfloat16", "channels_last"],
)
def test_survives(change):
    model, x = network("residual")
    changed = change(bnuq.convert(model))
    assert len(named_stochastic_layers(changed)) == 2
    expected = change(model)
    dtype = next(expected.parameters()).dtype
    assert_same(step(changed, x.to(dtype)), step(expected, x.to(dtype)))


def test_half_model_computes_in_half():
    model, x = network("depthwise")
    expected = copy.deepcopy(model).half().eval()(x.half())
    assert_same(bnuq.convert(model).half().eval()(x.half()), expected)


def test_saved_as_a_whole(tmp_path):
    model, x = network("depthwise")
    torch.save(bnuq.convert(model), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(step(loaded, x), step(model, x))


# ---- what is kept, what is changed


def test_shared_layer_stays_one_object():
    converted = bnuq.convert(Shared())
    assert converted.bn1 is converted.bn2 and type(converted.bn1) is bnuq.StochasticBatchNorm1d
    reverted = bnuq.revert(converted)
    assert reverted.bn1 is reverted.bn2 and type(reverted.bn1) is nn.BatchNorm1d


def test_hooks_and_attributes_stay():
    model, x = network("residual")
    seen = []
    model.bn.register_forward_hook(lambda m, args, y: seen.append(type(m)))
    model.bn.note = "mine"
    converted = bnuq.convert(model)
    converted(x)
    assert converted.bn.note == "mine" and seen == [bnuq.StochasticBatchNorm2d]


def test_a_model_that_cannot_be_copied_is_changed_in_place():
    model = mlp()
    model.lock = threading.Lock()
    text = "model must be one that copy.deepcopy can copy"
    got = "got cannot pickle '_thread.lock' object"
    with pytest.raises(TypeError) as caught:
        bnuq.convert(model)
    assert str(caught.value) == f"convert: {text} (inplace=True needs no copy), {got}"
    assert not named_stochastic_layers(model)
    assert bnuq.convert(model, inplace=True) is model
    with pytest.raises(TypeError) as caught:
        bnuq.revert(model)
    assert str(caught.value) == f"revert: {text} (inplace=True needs no copy), {got}"
    linear = nn.Linear(2, 2)
    linear.lock = model.lock
    with pytest.raises(TypeError) as caught:
        bnuq.to_bayesian(linear)
    assert str(caught.value) == f"to_bayesian: {text}, {got}"


def test_inplace_returns_the_same_objects():
    model = Residual()
    bn = model.bn
    assert bnuq.convert(model, inplace=True) is model and model.bn is bn
    assert type(bn) is bnuq.StochasticBatchNorm2d
    assert bnuq.revert(model, inplace=True) is model and type(bn) is nn.BatchNorm2d


def test_converting_again_changes_nothing():
    once = bnuq.convert(Residual())
    twice = bnuq.convert(once)
    assert classes(twice) == classes(once)
    assert bnuq.convert(once, inplace=True) is once and classes(twice) == classes(once)


def test_converting_again_adds_new_layers():
    model = nn.Sequential(bnuq.convert(mlp()), nn.BatchNorm1d(5))
    assert type(bnuq.convert(model)[1]) is bnuq.StochasticBatchNorm1d


def test_revert_drops_the_bank():
    converted = bnuq.convert(mlp())
    bank = bnuq.collect(converted, [torch.randn(8, 3)], num_batches=1, progress=False)
    assert converted[1].bank is bank
    assert not {"bank", "bank_name"} & vars(bnuq.revert(converted)[1]).keys()


def test_instance_and_group_norm_are_no_batch_norm():
    norms = [nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)]
    converted = bnuq.convert(nn.Sequential(nn.BatchNorm2d(4), *norms))
    assert [type(m) for m in converted[1:]] == [nn.InstanceNorm2d, nn.GroupNorm]


kinds = st.sampled_from(["bn1", "bn2", "bn3", "instance", "linear", "shared"])


@given(st.recursive(kinds, lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_any_tree_is_converted_and_reverted(tree):
    make = {
        "bn1": lambda: nn.BatchNorm1d(2),
        "bn2": lambda: nn.BatchNorm2d(2),
        "bn3": lambda: nn.BatchNorm3d(2),
        "instance": lambda: nn.InstanceNorm1d(2, track_running_stats=True),
        "linear": lambda: nn.Linear(2, 2),
    }
    shared = nn.BatchNorm1d(2)

    def build(node):
        if isinstance(node, list):
            return nn.Sequential(*map(build, node))
        return shared if node == "shared" else make[node]()

    model = nn.Sequential(build(tree), nn.BatchNorm1d(2))
    before = classes(model)
    converted = bnuq.convert(model)
    assert classes(converted) == {n: STOCHASTIC_CLASSES.get(c, c) for n, c in before.items()}
    assert len(list(converted.modules())) == len(list(model.modules()))
    assert list(converted.state_dict()) == list(model.state_dict())
    assert classes(bnuq.revert(converted)) == classes(model) == before


# ---- filter_fn


def test_filter_chooses_by_name_and_module_and_the_rest_is_remembered():
    asked = {}
    model, x = network("residual")

    def choose(name, module):
        asked[name] = module
        return name == "bn"

    converted = bnuq.convert(model, filter_fn=choose)
    assert asked == {"stem.1": model.stem[1], "bn": model.bn}
    for again in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert list(named_stochastic_layers(again)) == ["bn"]
        assert type(again.stem[1]) is nn.BatchNorm2d
        report = bnuq.doctor(again, x)
        assert (report.covered, report.excluded, report.uncovered) == (1, 1, 0)
    assert list(converted.state_dict()) == list(model.state_dict())
    assert bnuq.doctor(model, x).excluded_layers == []  # the given model was not marked
    assert bnuq.doctor(bnuq.revert(converted), x).excluded_layers == []
    assert len(named_stochastic_layers(bnuq.convert(converted))) == 2


class ManyNames(nn.Module):
    """One batch norm under two names, in a part that has two names too."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again, self.alias = self.part, self.part[1]
        self.last = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.last(self.alias(self.again(x)))


@pytest.mark.parametrize("chosen", ["part.1", "again.1", "alias"])
def test_filter_is_asked_by_each_name_of_a_shared_layer(chosen):
    asked = []

    def choose(name, module):
        asked.append(name)
        return name == chosen

    converted = bnuq.convert(ManyNames(), filter_fn=choose)
    assert converted.part[1] is converted.again[1] is converted.alias
    assert type(converted.alias) is bnuq.StochasticBatchNorm1d
    assert type(converted.last) is nn.BatchNorm1d
    names = ["part.1", "again.1", "alias"]
    assert asked == [*names[: names.index(chosen) + 1], "last"]


def test_filter_of_a_model_that_holds_itself():
    model = ManyNames()
    model.part.add_module("around", model)
    converted = bnuq.convert(model, inplace=True, filter_fn=lambda n, m: n == "alias")
    assert type(converted.alias) is bnuq.StochasticBatchNorm1d


def test_filter_that_fails_leaves_the_model_unchanged():
    model = Residual()
    before = classes(model)
    with pytest.raises(ZeroDivisionError):
        bnuq.convert(model, inplace=True, filter_fn=lambda name, module: name == "stem.1" or 1 / 0)
    assert classes(model) == before


@pytest.mark.parametrize(
    "filter_fn, error, text",
    [
        (lambda n, m: False, ValueError, "convert: filter_fn must choose a layer, got none"),
        ("bn", TypeError, "convert: filter_fn must be callable, got str"),
    ],
)
def test_filter_rejects(filter_fn, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        bnuq.convert(Residual(), filter_fn=filter_fn)


@pytest.mark.parametrize("prepare", ["pruned", "kept", "listed"])
def test_copies_what_torch_cannot_copy(prepare):
    """A weight that torch has pruned and an output that was kept hold a graph."""
    model, x = network("mlp")
    if prepare == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.5)
    else:
        model.kept = model(x) if prepare == "kept" else {"outputs": [model(x)]}
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    converted = bnuq.convert(model)
    assert_same(step(converted, x), step(model, x))
    assert_same(step(bnuq.revert(converted), x), step(model, x))
    turned = bnuq.to_bayesian(model, lambda name, layer: name == "4")
    assert_same(turned.eval()(x), model.eval()(x))


def test_revert_refuses_what_is_parametrised():
    model = bnuq.convert(network("mlp")[0])
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    message = "^revert: model must hold no stochastic layer that is parametrised, got layer '1'$"
    with pytest.raises(ValueError, match=message):
        bnuq.revert(model)
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert type(bnuq.revert(model)[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("training", [True, False])
def test_the_input_may_be_given_by_name(training):
    """As torch's layers call it."""
    norm, linear, x = nn.BatchNorm1d(3).train(training), nn.Linear(3, 2), torch.randn(4, 3)
    assert_same(bnuq.convert(norm)(input=x), norm(input=x))
    assert_same(bnuq.to_bayesian(linear).eval()(input=x), linear(input=x))


def test_weights_of_recurrent_layers_lie_together_in_a_copy(monkeypatch):
    """As cuDNN wants them on a GPU."""
    found = []
    model = nn.Sequential(nn.GRU(3, 3), nn.BatchNorm1d(3))
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda layer: found.append(layer))
    assert bnuq.convert(model)[0] in found and model[0] not in found
