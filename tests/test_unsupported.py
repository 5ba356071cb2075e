"""What convert cannot convert: reported with name and reason, never changed."""

import re

import pytest
import torch
from torch import nn
from zoo import Residual, classes, quietly

import bnuq_ext as bnuq
from bnuq_ext.nn import named_stochastic_layers


class LeakyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.leaky_relu(super().forward(x))


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))


class OwnBatchNorm(nn.Module):
    def __init__(self, part=None):
        super().__init__()
        if part is not None:
            self.register_buffer("moving_mean", torch.zeros(3))
            self.part = part


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


def fused_in_eval():
    layers = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU()
    model = nn.Sequential(*layers).eval()
    return quietly(lambda: torch.ao.quantization.fuse_modules(model, ["0", "1", "2"]))[0]


def quantised_when_fused():
    return quietly(lambda: torch.ao.nn.intrinsic.quantized.ConvReLU2d(3, 3, 1))


image = torch.randn(2, 3, 4, 4)
MAYBE_FUSED = (
    "(ConvReLU2d: fused by torch.ao, perhaps with batch norm; convert the model before it is fused)"
)
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
    "name, with a part": (
        lambda: OwnBatchNorm(nn.ReLU()),
        "(OwnBatchNorm: an unknown class of batch norm; see bnuq_ext.register",
    ),
    "name, with parameters": (
        lambda: OwnBatchNorm(nn.ParameterDict({"gamma": nn.Parameter(torch.ones(3))})),
        "(OwnBatchNorm: an unknown class of batch norm; see bnuq_ext.register",
    ),
    "quantised": (
        lambda: torch.ao.nn.quantized.BatchNorm2d(3),
        "(BatchNorm2d: quantised or fused by torch.ao; convert the float model)",
    ),
    "qat": (qat, "(ConvBn2d: quantised or fused by torch.ao; convert the float model)"),
    "fused": (fused, "(ConvBn2d: quantised or fused by torch.ao; convert the float model)"),
    "fused in eval": (fused_in_eval, MAYBE_FUSED),
    "quantised when fused": (quantised_when_fused, MAYBE_FUSED),
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


def test_what_holds_no_batch_norm_is_no_reason():
    layers = [
        quietly(lambda: torch.ao.nn.intrinsic.qat.ConvReLU2d(3, 3, 1, qconfig=qconfig())),
        quietly(lambda: torch.ao.nn.intrinsic.quantized.ConvReLU2d(3, 3, 1, bias=False)),
    ]
    model = nn.Sequential(nn.BatchNorm2d(3), *layers)
    assert list(named_stochastic_layers(bnuq.convert(model, inplace=True))) == ["0"]


def test_a_convolution_without_a_bias_has_no_batch_norm_in_it():
    layers = nn.Conv2d(3, 3, 1, bias=False), nn.ReLU(), nn.BatchNorm2d(3)
    model = quietly(
        lambda: torch.ao.quantization.fuse_modules(nn.Sequential(*layers).eval(), ["0", "1"])
    )
    assert list(named_stochastic_layers(bnuq.convert(model))) == ["2"]


@pytest.mark.parametrize("part", [nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.Conv2d(3, 3, 1)])
def test_a_block_of_layers_may_have_any_name(part):
    model = bnuq.convert(nn.Sequential(nn.BatchNorm2d(3), OwnBatchNorm(part)))
    assert len(named_stochastic_layers(model)) == 1 + isinstance(part, nn.BatchNorm2d)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")  # torch's own
@pytest.mark.parametrize("module_of", [lambda e: e.module(), torch.export.unflatten])
def test_an_exported_network_is_to_be_converted_before(module_of):
    """And nothing else is said, of the modules that hold its tensors."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    made = module_of(torch.export.export(network, (torch.randn(5, 4),)))
    message = r"got [\w ]+ \(\w+: its graph has 1 batch_norm calls; convert before export\)$"
    with pytest.raises(ValueError, match=message):
        bnuq.convert(made)


class HalfAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return nn.functional.batch_norm(self.norm(x), torch.zeros(3), torch.ones(3))


def test_the_layers_of_a_graph_that_calls_the_function_too_are_converted():
    graph = torch.fx.symbolic_trace(HalfAFunction())
    with pytest.warns(UserWarning, match="its graph has 1 batch_norm calls"):
        converted = bnuq.convert(graph, strict=False)
    assert list(named_stochastic_layers(converted)) == ["norm"]


def test_many_of_a_kind_are_counted():
    own = [OwnBatchNorm() for _ in range(6)]
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d(), *own)
    message = (
        r"got 1 \(LazyBatchNorm1d: lazy.*\), 2, 3, 4, 5 and 2 more \(OwnBatchNorm: an unknown class"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.convert(model)


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_with_nothing_else_is_an_error_or_stays_as_it_is(kind):
    make, text = UNSUPPORTED[kind]
    model = make()
    with pytest.raises(ValueError, match=f"got the model .*{re.escape(text)}"):
        bnuq.convert(model)
    message = f"^convert: not converted: the model .*{re.escape(text)}"
    with pytest.warns(UserWarning, match=message):
        left = bnuq.convert(model, strict=False, inplace=True)
    assert left is model and not named_stochastic_layers(left)


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


def test_a_copy_of_a_model_with_a_lazy_layer():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.warns(UserWarning, match=r"^convert: not converted: 1 \(LazyBatchNorm1d: lazy"):
        converted = bnuq.convert(model, strict=False)
    x = torch.randn(4, 3)
    torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    assert type(model[0]) is nn.BatchNorm1d and converted[1].running_mean.shape == (3,)
    assert converted[1].running_mean is not model[1].running_mean


def test_fused_into_convolutions_gets_a_hint():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    message = (
        "convert: model must contain a batch-norm layer, got none; 1 of its convolutions have a "
        "bias: if batch norm has been fused into them, load the unfused checkpoint"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bnuq.convert(nn.Sequential(fused))


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv2d(2, 2, 1, bias=False)])
@pytest.mark.parametrize("strict", [True, False])
def test_no_batch_norm(strict, layer):
    message = "convert: model must contain a batch-norm layer, got none"
    with pytest.raises(ValueError, match=f"^{message}$"):
        bnuq.convert(layer, strict=strict)


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
