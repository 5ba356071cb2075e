"""Adapters, against classes written here that behave as timm's and torchvision's do."""

import copy
import pickle
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import adapters
from bnuq_ext.nn import Stochastic, named_stochastic_layers
from bnuq_ext.passes import Pass, running


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features, drop=0.5, **options):
        super().__init__(num_features, **options)
        self.drop, self.act = nn.Dropout(drop), nn.LeakyReLU(0.25, inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(num_features) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class SyncBatchNormAct(nn.SyncBatchNorm):
    def forward(self, x):
        x = super().forward(x)
        for name in ("drop", "act"):  # set by the function that makes these layers
            x = getattr(self, name)(x) if hasattr(self, name) else x
        return x


def sync_batch_norm_act(num_features):
    layer = SyncBatchNormAct(num_features)
    layer.drop, layer.act = nn.Dropout(0.5), nn.ReLU()
    return layer


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class DetrFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Has no eps: it is written into the forward."""

    def __init__(self, num_features):
        super().__init__(num_features)
        del self.eps

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def publish(monkeypatch, cls, module_name):
    """The class moved to another module, importable from there as pickle needs it."""
    parts = module_name.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    setattr(sys.modules[module_name], cls.__name__, cls)
    monkeypatch.setattr(cls, "__module__", module_name)


TIMM = ["timm.layers.norm_act", "timm.models.layers.norm_act"]
TORCHVISION = "torchvision.ops.misc"
DETR = "transformers.models.detr.modeling_detr"
KNOWN = [
    *((name, BatchNormAct2d, BatchNormAct2d) for name in TIMM),
    (TIMM[0], SyncBatchNormAct, sync_batch_norm_act),
    (TIMM[0], SyncBatchNormAct, SyncBatchNormAct),
    (TIMM[0], FrozenBatchNormAct2d, FrozenBatchNormAct2d),
    (TORCHVISION, FrozenBatchNorm2d, FrozenBatchNorm2d),
    (DETR, DetrFrozenBatchNorm2d, DetrFrozenBatchNorm2d),
]
x = torch.randn(3, 4, 5, 2)


class Given(Pass):
    """Normalises with given statistics, in plain arithmetic."""

    def __init__(self, layers, mean, var):
        super().__init__(layers)
        self.mean, self.var = mean, var

    def normalise(self, layer, x, key, stream):
        weight, bias, eps = layer.affine_parameters()
        y = (x - self.mean[:, None, None]) / (self.var[:, None, None] + eps).sqrt()
        return layer.finish(y * weight[:, None, None] + bias[:, None, None])


@pytest.fixture(params=KNOWN)
def layer(request, monkeypatch):
    """A layer of each class under each of its names, with trained statistics."""
    module_name, cls, make = request.param
    publish(monkeypatch, cls, module_name)
    layer = make(4)
    for _ in range(3):
        layer(torch.randn(8, 4, 5, 2) + 1)
    return layer


def run(layer, training):
    torch.manual_seed(1)  # dropout
    inputs = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer.train(training)(inputs)
    y.square().sum().backward()
    return [y, inputs.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_behaves_as_the_original_outside_a_pass(layer, training, change):
    converted = change(bnuq.convert(layer))
    assert isinstance(converted, Stochastic) and isinstance(converted, type(layer))
    assert type(converted) is type(bnuq.convert(layer))
    assert list(converted.state_dict()) == list(layer.state_dict())
    torch.testing.assert_close(run(converted, training), run(layer, training), rtol=0, atol=0)
    reverted = bnuq.revert(converted)
    assert type(reverted) is type(layer)
    torch.testing.assert_close(run(reverted, training), run(layer, training), rtol=0, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 0.0, 0.5])
def test_in_a_pass_it_is_the_original_with_other_statistics(layer, eps):
    layer.eval().eps = eps
    mean, var = torch.randn(4), torch.tensor([0.7, 2e-5, 1.3, 0.9])  # one that eps counts for
    original = copy.deepcopy(layer).double()
    original.eps = eps or 1e-12  # torch 2.10 takes no 0
    original.running_mean.copy_(mean)
    original.running_var.copy_(var)
    converted = bnuq.convert(layer)
    with running(Given(named_stochastic_layers(converted), mean, var)):
        actual = converted(x)
    torch.testing.assert_close(actual.double(), original(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("converted", [True, False])
def test_frozen_batch_norm_takes_no_statistics_in_train(monkeypatch, converted):
    publish(monkeypatch, FrozenBatchNorm2d, TORCHVISION)
    torch.manual_seed(0)
    norms = FrozenBatchNorm2d(4), nn.BatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norms[0], nn.ReLU(), norms[1], nn.Flatten())
    model = bnuq.convert(net, filter_fn=lambda name, module: converted or name == "3")
    bnuq.collect(model, list(torch.randn(4, 8, 3, 2, 2)), progress=False)
    model.train()
    model[3].eval()
    x = torch.randn(5, 3, 2, 2)
    assert not any("in train()" in text for text in bnuq.doctor(model, x).warnings)
    with bnuq.replicas(model, 3, seed=0):
        y = model(x)
    expected = bnuq.predict(
        model, x, likelihood="gaussian", num_samples=3, seed=0, keep_samples=True
    )
    torch.testing.assert_close(y.view(3, 5, -1), expected.samples)
    model[3].train()
    assert any("batch norm in train(): 3." in text for text in bnuq.doctor(model, x).warnings)


@pytest.mark.parametrize("make", [BatchNormAct2d, sync_batch_norm_act, FrozenBatchNormAct2d])
def test_in_a_pass_it_drops_before_it_acts(make, monkeypatch):
    layer = make(4)
    publish(monkeypatch, type(layer), TIMM[0])
    layer.drop, layer.act = nn.Dropout(1.0), nn.Softplus()  # in train(): everything is dropped
    converted = bnuq.convert(layer)
    with running(Given(named_stochastic_layers(converted), torch.zeros(4), torch.ones(4))):
        torch.testing.assert_close(converted(x), torch.full_like(x, 2.0).log())


def test_frozen_without_eps_has_eps_zero(monkeypatch):
    publish(monkeypatch, FrozenBatchNorm2d, TORCHVISION)
    layer = FrozenBatchNorm2d(4)
    del layer.eps  # as torchvision wrote it before 0.7
    weight, bias, eps = bnuq.convert(layer).affine_parameters()
    assert eps == 0.0
    assert torch.equal(weight, layer.weight) and torch.equal(bias, layer.bias)


def test_every_frozen_batch_norm_of_transformers_is_known():
    known = {name for name in adapters._ADAPTERS if str(name).startswith("transformers.")}
    assert len(known) == 14
    models = "transformers.models."
    assert models + "rt_detr_v2.modeling_rt_detr_v2.RTDetrV2FrozenBatchNorm2d" in known
    assert models + "dab_detr.modeling_dab_detr.DabDetrFrozenBatchNorm2d" in known


def test_in_a_pass_frozen_wants_four_dimensions(monkeypatch):
    publish(monkeypatch, FrozenBatchNorm2d, TORCHVISION)
    converted = bnuq.convert(FrozenBatchNorm2d(4))
    with running(Given(named_stochastic_layers(converted), torch.zeros(4), torch.ones(4))):
        with pytest.raises(ValueError, match="^expected 4D input \\(got 3D input\\)$"):
            converted(x[0])


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
def test_an_activation_follows_the_drawn_statistics(sampler, monkeypatch):
    """As the same model has it with the activation beside its norm."""
    publish(monkeypatch, BatchNormAct2d, TIMM[0])
    inside = nn.Sequential(BatchNormAct2d(4), nn.Flatten())
    beside = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.LeakyReLU(0.25), nn.Flatten()))
    data, found = torch.randn(48, 4, 5, 2) * 2 + 1, []
    for model in (inside, beside):
        model = bnuq.convert(model).eval()
        bnuq.collect(model, list(data.split(8)), 6, progress=False)
        options = {"likelihood": "gaussian", "sampler": sampler, "seed": 2, "keep_samples": True}
        found.append(bnuq.predict(model, x, **options).samples)
    torch.testing.assert_close(*found)
    assert (found[0] < 0).any()


def test_only_the_exact_type_has_the_adapter(monkeypatch):
    publish(monkeypatch, BatchNormAct2d, TIMM[0])
    subclass = type("Sub", (BatchNormAct2d,), {})
    with pytest.raises(ValueError, match="Sub: a subclass of a torch batch norm"):
        bnuq.convert(subclass(4))


# ---- adapters of users


class Norm(nn.Module):
    """Batch norm with another name for its parameters."""

    def __init__(self, num_features):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.rand(num_features)) for _ in range(2))
        self.register_buffer("running_mean", torch.rand(num_features))
        self.register_buffer("running_var", torch.rand(num_features) + 0.5)

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.scale, self.shift)


class StochasticNorm(Stochastic, Norm):
    def check_input(self, x):
        pass

    def affine_parameters(self):
        return self.scale, self.shift, 1e-5


def swap(module):
    module.__class__ = StochasticNorm
    return module


def replace(module):
    made = StochasticNorm(module.scale.numel())
    made.load_state_dict(module.state_dict())
    return made


@pytest.fixture
def register(monkeypatch):
    """register_adapter, forgotten after the test."""
    monkeypatch.setattr(adapters, "_ADAPTERS", dict(adapters._ADAPTERS))
    return bnuq.register_adapter


@pytest.mark.parametrize("key", [Norm, f"{__name__}.Norm"])
@pytest.mark.parametrize("adapt", [swap, replace])
def test_registered_adapter(register, key, adapt):
    norm = Norm(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "c": nn.BatchNorm2d(4)}).eval()
    with pytest.raises(ValueError, match="got a \\(Norm: an unknown class of batch norm"):
        bnuq.convert(model)
    register(key, adapt)
    converted = bnuq.convert(model)
    assert list(named_stochastic_layers(converted)) == ["a", "c"]
    assert converted["a"] is converted["b"][0] and not converted["a"].training
    assert list(converted.state_dict()) == list(model.state_dict())
    assert torch.equal(converted["a"](x), norm(x))

    with torch.no_grad():
        converted["a"].scale.fill_(3)
    converted["a"].scale.requires_grad_(False)
    converted = pickle.loads(pickle.dumps(copy.deepcopy(converted).double())).train()
    reverted = bnuq.revert(converted)
    assert type(reverted["a"]) is Norm and reverted["a"] is reverted["b"][0]
    assert reverted["a"].training and not reverted["a"].scale.requires_grad
    assert reverted["a"].shift.requires_grad
    assert torch.equal(reverted["a"](x.double()), converted["a"](x.double()))


def test_new_object_in_the_place_of_the_root(register):
    register(Norm, replace)
    model = Norm(4)
    converted = bnuq.convert(model, inplace=True)
    assert type(converted) is StochasticNorm and type(bnuq.revert(converted)) is Norm
    assert bnuq.revert(converted, inplace=True) is model


def test_last_registration_counts(register):
    register(Norm, swap)
    register(Norm, lambda module: None)
    with pytest.raises(TypeError):
        bnuq.convert(Norm(4))


class Other(StochasticNorm):
    def __init__(self):
        super().__init__(4)
        self.extra = nn.Parameter(torch.zeros(1))


def broken(module):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "adapt, error, text",
    [
        (
            lambda module: nn.Identity(),
            TypeError,
            "convert: the adapter of 1 must return a stochastic layer, got Identity",
        ),
        (
            lambda module: Other(),
            ValueError,
            "convert: the adapter of 1 must keep the keys ['scale', 'shift', 'running_mean', "
            "'running_var'], got ['scale', 'shift', 'extra', 'running_mean', 'running_var']",
        ),
        (
            replace,
            ValueError,
            "convert: the adapter of 1 must carry over _forward_hooks, got none",
        ),
        (broken, ZeroDivisionError, ""),
    ],
)
def test_adapter_that_fails_leaves_the_model_unchanged(register, adapt, error, text):
    register(Norm, adapt)
    first, norm = nn.BatchNorm2d(4), Norm(4)
    norm.register_forward_hook(lambda module, args, y: None)
    model = nn.Sequential(first, norm)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        bnuq.convert(model, inplace=True)
    assert list(model) == [first, norm]
    assert type(first) is nn.BatchNorm2d and type(norm) is Norm


CLASS = "cls_or_qualified_name must be"


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((3, swap), TypeError, f"{CLASS} a subclass of nn.Module or a string, got 3"),
        ((int, swap), TypeError, f"{CLASS} a subclass of nn.Module or a string, got {int}"),
        (("Norm", swap), ValueError, f"{CLASS} a name like \"package.module.Class\", got 'Norm'"),
        (("a.", swap), ValueError, f"{CLASS} a name like \"package.module.Class\", got 'a.'"),
        ((Norm, "swap"), TypeError, "fn must be callable, got str"),
    ],
)
def test_register_rejects(register, arguments, error, text):
    with pytest.raises(error, match=f"^register_adapter: {re.escape(text)}$"):
        register(*arguments)
