"""Converted models under torch.compile, torch.fx, TorchScript and torch.export."""

import io
import warnings

import pytest
import torch
from torch import nn
from zoo import Residual, assert_same, network, quietly, step

import bnuq_ext as bnuq
from bnuq_ext.nn import Stochastic, named_stochastic_layers
from bnuq_ext.passes import Pass, running
from bnuq_ext.untraced import uncompiled


@pytest.fixture(autouse=True)
def compiled_anew():
    """Some versions compile a function, in whatever module, a few times only."""
    torch.compiler.reset()


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


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="older dynamo does not notice that a module's class has changed; predict finds no call and refuses",
)
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


@pytest.mark.parametrize("how", ["export", "trace"])
def test_replicas_are_neither_traced_nor_exported(how):
    model, x = network("residual")
    model = bnuq.convert(model).eval()
    bnuq.collect(model, list(torch.randn(4, *x.shape)), 4, progress=False)
    with (
        bnuq.replicas(model, 3, 0),
        pytest.raises(ValueError, match="replicas: model must be exported outside the body"),
    ):
        if how == "export":
            torch.export.export(model, (x,))
        quietly(lambda: torch.jit.trace(model, x))


class Predictive(nn.Module):
    """The mean probabilities of a model."""

    def __init__(self, model, **options):
        super().__init__()
        self.model = model
        self.options = {"likelihood": "categorical", "num_samples": 5, "seed": 0} | options

    def forward(self, x):
        return bnuq.predict(self.model, x, **self.options).mean


def predictive(kind, **options):
    model, x = network(kind)
    model = bnuq.convert(model).eval().requires_grad_(False)
    bnuq.collect(model, list(torch.randn(8, *x.shape)), 8, progress=False)
    return Predictive(model, **options), x


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its exporter
@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["mlp", "residual"])
def test_predictions_are_exported_for_any_number_of_rows(kind, before):
    module, x = predictive(kind, keep_samples=True)
    if before:
        module(x)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    file = io.BytesIO()
    torch.export.save(program.run_decompositions(), file)
    loop = Predictive(module.model, keep_samples=True, strategy="loop")
    for exported in (program, torch.export.load(file)):
        for rows in (torch.randn_like(x), torch.randn(len(x) + 3, *x.shape[1:])):
            assert_same(exported.module()(rows), loop(rows))
            torch.testing.assert_close(module(rows), loop(rows))


@pytest.mark.parametrize("kind", ["mlp", "residual"])
def test_predictions_are_traced(kind):
    module, x = predictive(kind)
    traced = quietly(lambda: torch.jit.trace(module, x))
    rows = torch.randn_like(x)
    expected = Predictive(module.model, strategy="loop")(rows)
    assert_same(traced(rows), expected)
    torch.testing.assert_close(module(rows), expected)


@pytest.mark.parametrize("how", ["export", "trace"])
def test_what_is_recorded_is_not_folded(how):
    module, x = predictive("mlp", strategy="folded")
    requirement = 'predict: strategy must be "auto" or "loop" in an export or a trace, got folded'
    with pytest.raises(ValueError, match=requirement):
        if how == "export":
            torch.export.export(module, (x,), strict=False)
        quietly(lambda: torch.jit.trace(module, x))


def test_parameters_that_a_trace_does_not_know_are_torchs_error():
    """Not the end of the process."""
    module, x = predictive("residual")
    module.model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a const"):
        quietly(lambda: torch.jit.trace(lambda x: module(x), x))


@pytest.mark.parametrize("training", [True, False])
def test_flags_of_a_compiled_model_are_put_back(training):
    model, x = network("mlp")
    converted = bnuq.convert(model).train(training)
    compiled = torch.compile(converted, backend="eager")
    runs = [
        lambda: bnuq.collect(compiled, list(torch.randn(3, 8, 3)), 3, progress=False),
        lambda: bnuq.doctor(compiled, x),
        lambda: bnuq.ensemble([compiled], x, likelihood="categorical"),
        lambda: bnuq.predict(compiled, x, likelihood="categorical", num_samples=3, seed=0),
    ]
    for run in runs:
        run()
        assert all(module.training == training for module in compiled.modules())


FULLGRAPH = pytest.param(
    True,
    marks=pytest.mark.skipif(
        torch.__version__ < (2, 14),
        reason="older dynamo breaks the graph at a context variable, which fullgraph does not allow",
    ),
)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own, in torch 2.10
@pytest.mark.parametrize("fullgraph", [FULLGRAPH, False])
def test_trials_do_not_compile(fullgraph):
    """torch compiles a function eight times, and then never again;
    fullgraph asks for no watching."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, x = network("residual")
    model = bnuq.convert(model).eval()
    bnuq.collect(model, list(torch.randn(4, 8, 3, 5, 6)), 4, progress=False)
    options = dict(likelihood="gaussian", num_samples=3, seed=1, keep_samples=True)
    expected = bnuq.predict(model, x, **options).samples
    model.stem = torch.compile(model.stem, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        actual = bnuq.predict(model, x, strategy="folded", **options).samples
        torch.testing.assert_close(actual, expected)
    with bnuq.replicas(model, 3, seed=1):
        torch.testing.assert_close(model(x), expected.flatten(0, 1))
    assert 1 <= len(graphs) <= 3


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own, in torch 2.10
def test_dropout_of_a_compiled_part():
    torch.manual_seed(0)
    part, x = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5)), torch.randn(6, 5)
    options = dict(likelihood="gaussian", num_samples=3, seed=1, keep_samples=True)
    expected = bnuq.mc_dropout(part, x, **options).samples
    model = nn.Sequential(torch.compile(part, backend="eager", fullgraph=True))
    with torch.no_grad():
        model.eval()(x)
    torch.testing.assert_close(bnuq.mc_dropout(model, x, **options).samples, expected)


def test_uncompiled_within_compiled_code():
    """There torch refuses to change how it compiles."""

    def inside(x):
        torch._dynamo.graph_break()
        with uncompiled():
            return x + 1

    assert_same(torch.compile(inside, backend="eager")(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own, in torch 2.10
@pytest.mark.parametrize("fullgraph", [FULLGRAPH, False])
def test_a_training_step_of_a_compiled_chain(fullgraph):
    torch.compiler.reset()
    model = nn.Sequential(bnuq.BayesLinear(6, 9), nn.ReLU(), bnuq.BayesLinear(9, 3))
    x, y, parameters = torch.randn(16, 6), torch.arange(16) % 3, list(model.parameters())
    expected = bnuq.elbo_loss(model, x, y, batch_weight=0.2, seed=1)
    wanted = torch.autograd.grad(expected.loss, parameters)
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    out = bnuq.elbo_loss(model, x, y, batch_weight=0.2, seed=1)
    torch.testing.assert_close(list(out), list(expected))
    grads = torch.autograd.grad(out.loss, parameters)
    for actual, e in zip(grads, wanted, strict=True):
        torch.testing.assert_close(actual, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_compiled_step_leaves_trials_as_they_are(num_samples, recwarn):
    x, y, model = torch.randn(8, 6), torch.randint(6, (8,)), nn.Sequential(nn.Linear(6, 6))
    model.append(nn.Softmax(1)).append(bnuq.BayesLinear(6, 6))  # no plain chain

    def step(x, y):
        return bnuq.elbo_loss(model, x, y, num_samples=num_samples, seed=1, batch_weight=0.1).loss

    loss = torch.compile(step, backend="aot_eager")(x, y)
    assert not [w for w in recwarn if "Dynamo" in str(w.message)]
    torch.testing.assert_close(loss, step(x, y))


def test_torchscript_refuses_stochastic_layers_and_leaves_them():
    model, x = network("residual")
    converted = bnuq.convert(model).eval()
    before = [type(module) for module in converted.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, of script itself
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(
            TypeError, match="^torch.jit.script: obj must have no stochastic layers"
        ):
            torch.jit.script(converted)
        assert [type(module) for module in converted.modules()] == before
        assert_same(torch.jit.script(bnuq.revert(converted))(x), model.eval()(x))


@pytest.mark.filterwarnings("ignore")  # torch's own: script and trace are deprecated
@pytest.mark.parametrize("stochastic", [lambda: bnuq.BayesLinear(4, 3), lambda: bnuq.convert(nn.BatchNorm1d(4))])  # fmt: skip
def test_the_advice_of_torchscript_serves_every_stochastic_layer(stochastic):
    model, x = nn.Sequential(stochastic()).eval(), torch.randn(5, 4)
    advice = r"\(bnuq_ext.revert undoes those of batch norm; torch.jit.trace takes all\), got"
    with pytest.raises(TypeError, match=advice):
        torch.jit.script(model)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


def of_replicas(model, x, seed):
    with torch.no_grad(), bnuq.replicas(model, 3, seed=seed):
        return model(x)


CALLS = {
    "replicas": lambda model, x: of_replicas(model, x, 0),
    "replicas without a seed": lambda model, x: of_replicas(model, x, None),
    "statistics_normality": lambda model, x: bnuq.statistics_normality(
        model, (x,), 4, num_batches=8, progress=False
    ).bank.mean["1"],
    "fit_batch_size": lambda model, x: (
        bnuq.fit_batch_size(
            model,
            (x, x.sum(1)),
            [4, 8],
            likelihood="gaussian",
            noise_var=1.0,
            num_samples=2,
            progress=False,
        ).nll
    ),
    "predict": lambda model, x: bnuq.predict(model, x, likelihood="gaussian", seed=0).mean,
}


@pytest.mark.parametrize("call", CALLS)
def test_in_a_compiled_function_nothing_is_traced_that_torch_warns_of(call):
    torch.manual_seed(0)
    model = bnuq.convert(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))).eval()
    bnuq.collect(model, torch.randn(3, 8, 4).unbind(), progress=False)
    x, results = torch.randn(40, 4), []
    compiled = torch.compile(CALLS[call], backend="eager")
    for run in (compiled, CALLS[call]):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", "(collect|fit_batch_size).*more than a tenth")
            results.append(run(model, x))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
