import copy
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import ZOO, Residual, Shared, mlp, network

import bnuq_ext as bnuq
from bnuq_ext.nn import STOCHASTIC_CLASSES, Stochastic, named_stochastic_layers
from bnuq_ext.replicas import Pass, running

zoo = pytest.mark.parametrize("name", ZOO)


def step(model, x):
    """Output, gradients and buffers of one forward and backward."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def classes(model):
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


# ---- outside a pass: the original


@zoo
@pytest.mark.parametrize("training", [True, False])
def test_behaves_as_the_original(name, training):
    model, x = network(name)
    converted = bnuq.convert(model)
    for _ in range(2):
        expected = step(model.train(training), x)
        assert_same(step(converted.train(training), x), expected)


@zoo
def test_every_batch_norm_has_its_class_and_revert_gives_it_back(name):
    model, x = network(name)
    before = {
        n: c.__qualname__ for n, c in classes(model).items()
    }  # a graph's copy has its own class
    converted = bnuq.convert(model)
    assert {n: c.__qualname__ for n, c in classes(converted).items()} == {
        n: f"Stochastic{c}" if c.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) else c
        for n, c in before.items()
    }
    assert {n: c.__qualname__ for n, c in classes(model).items()} == before
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


# ---- what cannot be converted


class LeakyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.leaky_relu(super().forward(x))


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))


class OwnBatchNorm(nn.Module):
    pass


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrised():
    layer = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def patched():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x
    return layer


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def exported():
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    return torch.export.export(model, (torch.randn(2, 3, 4, 4),)).module()


def qat():
    return quietly(lambda: torch.ao.nn.intrinsic.qat.ConvBn2d(3, 3, 1, qconfig=qconfig()))


def qconfig():
    return torch.ao.quantization.get_default_qat_qconfig("fbgemm")


def fused():
    conv, bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    return quietly(lambda: torch.ao.nn.intrinsic.ConvBn2d(conv, bn))


image = torch.randn(2, 3, 4, 4)
UNSUPPORTED = {
    "subclass": (
        lambda: LeakyNorm(3),
        "(LeakyNorm: a subclass of a torch batch norm; see bnuq_ext.register",
    ),
    "lazy": (nn.LazyBatchNorm2d, "(LazyBatchNorm2d: lazy; run one dummy forward first)"),
    "parametrised": (parametrised, "BatchNorm2d: parametrised; remove the parametrisations first"),
    "patched": (patched, "(BatchNorm2d: its forward is replaced on the object)"),
    "buffers": (
        lambda: OwnNorm(),
        "(OwnNorm: an unknown class of batch norm; see bnuq_ext.register",
    ),
    "name": (OwnBatchNorm, "(OwnBatchNorm: an unknown class of batch norm; see bnuq_ext.register"),
    "quantised": (
        lambda: torch.ao.nn.quantized.BatchNorm2d(3),
        "(BatchNorm2d: quantised or fused by torch.ao; convert the float model)",
    ),
    "qat": (qat, "(ConvBn2d: quantised or fused by torch.ao; convert the float model)"),
    "fused": (fused, "(ConvBn2d: quantised or fused by torch.ao; convert the float model)"),
    "scripted": (
        lambda: quietly(lambda: torch.jit.script(nn.BatchNorm2d(3))),
        "(RecursiveScriptModule: TorchScript; convert the Python model)",
    ),
    "traced": (
        lambda: quietly(lambda: torch.jit.trace(Residual().eval(), image)),
        "(TopLevelTracedModule: TorchScript; convert the Python model)",
    ),
    "exported": (exported, ": its graph has 1 batch_norm calls; convert before export)"),
    "compiled": (
        lambda: torch.compile(nn.BatchNorm2d(3), backend="eager"),
        "(OptimizedModule: compiled; convert first, then torch.compile)",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_reports_what_it_cannot_convert(kind):
    make, text = UNSUPPORTED[kind]
    layer = make()
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(layer))
    before = classes(model)
    with pytest.raises(
        ValueError, match=f"^convert: model must contain only .* got 1.0.*{re.escape(text)}"
    ):
        bnuq.convert(model, inplace=True)
    assert classes(model) == before
    with pytest.warns(
        UserWarning, match=f"^convert: not converted: 1.0.*{re.escape(text)}"
    ) as caught:
        converted = bnuq.convert(model, strict=False, inplace=True)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [name for name in classes(model) if classes(model)[name] != before[name]] == ["0"]
    assert list(named_stochastic_layers(converted)) == ["0"]


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_with_nothing_else_is_an_error(kind):
    make, text = UNSUPPORTED[kind]
    with pytest.raises(ValueError, match=f"got the model .*{re.escape(text)}"):
        bnuq.convert(make())
    message = f"^convert: model must contain a batch-norm layer, got none that.*{re.escape(text)}"
    with pytest.raises(ValueError, match=message):
        bnuq.convert(make(), strict=False)


def test_scripts_and_graphs_without_batch_norm_are_left_alone():
    script = quietly(lambda: torch.jit.script(nn.Linear(3, 3)))
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    compiled = torch.compile(nn.Linear(3, 3), backend="eager")
    converted = bnuq.convert(nn.Sequential(script, graph, compiled, nn.BatchNorm1d(3)))
    assert list(named_stochastic_layers(converted)) == ["3"]


class ConvBatchNorm(nn.Sequential):
    pass


def test_a_container_is_judged_by_its_parts():
    model = ConvBatchNorm(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert list(named_stochastic_layers(bnuq.convert(model))) == ["1"]


def test_lazy_layer_is_converted_after_a_forward():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(torch.randn(4, 3))
    assert type(bnuq.convert(model)[0]) is bnuq.StochasticBatchNorm1d


def test_fused_into_convolutions_gets_a_hint():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    message = (
        "convert: model must contain a batch-norm layer, got none; 1 of its convolutions have a "
        "bias: if batch norm has been fused into them, load the unfused checkpoint"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bnuq.convert(nn.Sequential(fused))


@pytest.mark.parametrize("strict", [True, False])
def test_no_batch_norm(strict):
    message = "convert: model must contain a batch-norm layer, got none"
    with pytest.raises(ValueError, match=f"^{message}$"):
        bnuq.convert(nn.Linear(2, 2), strict=strict)


@pytest.mark.parametrize("op", ["convert", "revert"])
def test_needs_a_module(op):
    program = torch.export.export(nn.BatchNorm2d(3).eval(), (image,))
    for value, got in [(None, "NoneType"), (program, "ExportedProgram")]:
        with pytest.raises(TypeError, match=f"^{op}: model must be a torch.nn.Module, got {got}$"):
            getattr(bnuq, op)(value)


def test_revert_needs_a_stochastic_layer():
    message = "^revert: model must contain a stochastic layer, got none$"
    with pytest.raises(ValueError, match=message):
        bnuq.revert(Residual())


# ---- compilers and tracers


class PlusOne(Pass):
    """Layers behave as usual, plus one."""

    def normalise(self, layer, x, key, stream):
        return layer.finish(layer.plain_forward(x) + 1)


def in_pass(model, converted, x):
    with running(PlusOne(named_stochastic_layers(converted))) as active:
        return model(x), dict(active.calls)


def test_compiled_whole_it_equals_eager():
    model, x = network("residual")
    converted = bnuq.convert(model).eval()
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), model.eval()(x))


def test_compiled_it_takes_part_in_a_pass():
    model, x = network("residual")
    converted = bnuq.convert(model).eval()
    compiled = torch.compile(converted, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(x)
        for _ in range(3):
            assert_same(in_pass(compiled, converted, x), in_pass(converted, converted, x))
            assert in_pass(compiled, converted, x)[1] == {"stem.1": 1, "bn": 1}
            assert not torch.allclose(in_pass(compiled, converted, x)[0], plain)
            assert_same(compiled(x), plain)


def test_compiled_whole_it_does_not_ignore_a_pass():
    model, x = network("residual")
    converted = bnuq.convert(model).eval()
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        expected = in_pass(converted, converted, x)
        try:
            actual = in_pass(compiled, converted, x)
        except torch._dynamo.exc.Unsupported as error:
            assert torch.__version__ < (2, 14) and "ContextVar" in str(error)
        else:
            assert_same(actual, expected)


def test_compiled_first_then_converted_in_place_takes_part_in_a_pass():
    model, x = network("residual")
    model.eval().compile(backend="aot_eager")
    with torch.no_grad():
        plain = model(x)
        bnuq.convert(model, inplace=True)
        assert_same(model(x), plain)
        actual, calls = in_pass(model, model, x)
        assert calls == {"stem.1": 1, "bn": 1} and not torch.allclose(actual, plain)


def test_compiled_model_that_was_converted_can_be_converted_again():
    compiled = torch.compile(bnuq.convert(Residual()), backend="eager")
    assert isinstance(bnuq.convert(compiled, inplace=True).bn, Stochastic)


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_trace_keeps_the_layers(training):
    model, x = network("residual")
    traced = torch.fx.symbolic_trace(bnuq.convert(model)).train(training)
    assert list(named_stochastic_layers(traced)) == ["stem.1", "bn"]
    assert_same(step(traced, x), step(model.train(training), x))


def test_jit_trace_is_the_original():
    model, x = network("residual")
    traced = quietly(lambda: torch.jit.trace(bnuq.convert(model).eval(), x))
    assert_same(traced(x), model.eval()(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export_is_the_original(strict):
    model, x = network("residual")
    program = torch.export.export(bnuq.convert(model).eval(), (x,), strict=strict)
    assert_same(program.module()(x), model.eval()(x))
