import threading
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bnuq_ext as bnuq
from bnuq_ext.nn import named_stochastic_layers
from bnuq_ext.norm_calls import count_uncovered
from bnuq_ext.passes import Pass, running


class Functional(nn.Module):
    """Batch norm as a function, with statistics that no module of batch norm holds."""

    def __init__(self):
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.left, self.idle = (nn.BatchNorm2d(4) for _ in range(3))
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.drop, self.function = nn.Dropout(), Functional()

    def forward(self, x, scale=1.0):
        self.grad_enabled = torch.is_grad_enabled()
        x = torch.rand(()) + self.left(self.instance(self.twice(self.twice(scale * x))))
        return self.function(self.drop(x))


class Constant(Pass):
    """Like a replica: no batch-norm operator of torch is called."""

    def normalise(self, layer, x, key, stream):
        return torch.zeros_like(x)


x = torch.randn(2, 4, 3, 3)


def counts(report):
    return report.covered, report.excluded, report.uncovered


def test_counts_calls_by_who_makes_them():
    model = Network()
    assert counts(bnuq.doctor(model, x)) == (0, 0, 4)
    assert counts(bnuq.doctor(bnuq.convert(model), x)) == (3, 0, 1)
    partial = bnuq.convert(model, filter_fn=lambda name, module: name != "left")
    report = bnuq.doctor(partial, x)
    assert counts(report) == (2, 1, 1)
    assert report.converted == {"twice": 2, "idle": 0}
    assert report.excluded_layers == ["left"] and report.unconverted == {}


def test_an_excluded_layer_is_known_by_its_buffers_too():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3))
    report = bnuq.doctor(
        bnuq.convert(model, filter_fn=lambda name, _: name == "1"), torch.ones(2, 3)
    )
    assert (report.covered, report.excluded, report.uncovered) == (1, 1, 0)


def test_takes_any_mapping():
    report = bnuq.doctor(Network(), UserDict({"x": x, "scale": 2.0}))
    assert counts(report) == (0, 0, 4)


class Standardised(nn.Conv2d):
    """As in normaliser-free networks: what is normalised is the weight, not a batch."""

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, len(self.weight), -1), None, None, training=True
        )
        return self._conv_forward(x, weight.view_as(self.weight), self.bias)


def test_standardised_weights_are_no_batch_norm(recwarn):
    model = bnuq.convert(nn.Sequential(Standardised(4, 4, 1), nn.BatchNorm2d(4)))
    assert counts(bnuq.doctor(model, x)) == (1, 0, 0)
    bnuq.collect(model, [x, 2 * x], progress=False)
    bnuq.predict(model, x, likelihood="categorical", num_samples=2)
    assert not recwarn.list


@torch.library.custom_op("bnuq_test::joint_batch_norm", mutates_args=())
def joint_batch_norm(scale: float, xs: list[Tensor]) -> Tensor:
    return scale * torch.cat(xs)


def test_operators_of_others_may_take_lists():
    class Joint(nn.Module):
        def forward(self, x):
            return joint_batch_norm(2.0, [x, x])

    assert counts(bnuq.doctor(Joint(), x)) == (0, 0, 1)


def test_names_what_is_not_converted():
    model = nn.Sequential(bnuq.convert(nn.BatchNorm1d(3)), nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    report = bnuq.doctor(model, torch.randn(2, 3))
    assert counts(report) == (1, 0, 2)
    assert report.unconverted == {"1": "BatchNorm1d", "2": "BatchNorm1d"}  # no longer lazy


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_sees_scripted_batch_norm():
    script = torch.jit.script(nn.BatchNorm1d(3))
    report = bnuq.doctor(nn.Sequential(bnuq.convert(nn.BatchNorm1d(3)), script), torch.randn(2, 3))
    assert counts(report) == (1, 0, 1)
    assert list(report.unconverted) == ["1"] and "TorchScript" in report.unconverted["1"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_sees_quantised_batch_norm():
    layer = torch.ao.nn.quantized.BatchNorm2d(4)
    quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    assert counts(bnuq.doctor(layer, quantised)) == (0, 0, 1)


def test_sees_compiled_batch_norm():
    model = bnuq.convert(Network()).eval()
    model.function = torch.compile(model.function, backend="eager")
    with torch.no_grad():
        model(x)
    assert counts(bnuq.doctor(model, x)) == (3, 0, 1)
    partial = bnuq.convert(Network(), filter_fn=lambda name, module: name != "left")
    report = bnuq.doctor(torch.compile(partial, backend="eager"), x)
    assert counts(report) == (2, 1, 1)
    assert (report.converted, report.excluded_layers) == ({"twice": 2, "idle": 0}, ["left"])


def test_report_reads_well():
    partial = bnuq.convert(Network(), filter_fn=lambda name, module: name != "left")
    model = nn.Sequential(partial, nn.BatchNorm2d(4)).eval()
    assert repr(bnuq.doctor(model, x)).split("\n") == [
        "5 batch-norm calls: 2 by 2 stochastic layers, 1 by excluded layers, 2 not covered; "
        "modules that are not converted: 1",
        "  stochastic, never called: 0.idle",
        "  excluded: 0.left",
        "  not converted: 1 (BatchNorm2d)",
        "  warning: batch norm after dropout: 0.function, 1. Dropout changes the variance from train() to "
        "eval(), so the running statistics do not fit; keep dropout behind the last batch norm",
    ]


@pytest.mark.parametrize("inputs", [x, (x,), (x, 2.0), {"x": x, "scale": 2.0}])
def test_takes_what_a_model_takes(inputs):
    assert counts(bnuq.doctor(bnuq.convert(Network()), inputs)) == (3, 0, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_as_found(fails):
    model = bnuq.convert(Network()).train()
    model.left.eval()
    if fails:
        model.function.forward = None
    state = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    rng = torch.get_rng_state()
    try:
        bnuq.doctor(model, x)
    except TypeError:
        assert fails
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled() and not model.grad_enabled
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    with count_uncovered(model) as counter:
        model.twice(x)
    assert counter.uncovered == 1  # the counter before is not active any more


def test_inside_a_pass_only_foreign_calls_count():
    model = bnuq.convert(Network(), filter_fn=lambda name, module: name != "left").eval()
    with running(Constant(named_stochastic_layers(model))), count_uncovered(model) as counter:
        model(x)
    assert (counter.excluded, counter.uncovered) == (1, 1)


def test_own_ops_and_backward_do_not_count():
    mean, var = torch.zeros(2, 4), torch.ones(2, 4)
    snapshot = torch.tensor([0, 1])
    with count_uncovered(Network()) as counter:
        bnuq.ops.batch_norm_bank(x, mean, var, snapshot=snapshot, shared=True)
        F.batch_norm(x.requires_grad_(), mean[0], var[0]).sum().backward()
    assert counter.uncovered == 1


def test_calls_behind_an_instance_norm_that_fails_count():
    with count_uncovered(Network()) as counter:
        with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
            F.instance_norm(torch.ones(2, 4, 1))
        F.batch_norm(x, torch.zeros(4), torch.ones(4))
    assert counter.uncovered == 1


def test_threads_count_their_own_calls():
    model, together = nn.BatchNorm2d(4).eval(), threading.Barrier(8)

    def work(calls):
        together.wait()
        with count_uncovered(model) as counter:
            for _ in range(calls):
                model(x)
        return counter.uncovered

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(1, 9))) == list(range(1, 9))
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((x, x), "doctor: model must be a torch.nn.Module, got Tensor"),
        ((Network(), [x]), "doctor: x must be a tensor, a tuple or a dict, got list"),
    ],
)
def test_rejects(arguments, text):
    with pytest.raises(TypeError, match=f"^{text}$"):
        bnuq.doctor(*arguments)


class Logging(nn.Module):
    """Keeps what the running statistics are, and computes nothing with them."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        mean, var, _ = self.bn.buffers()
        mean.detach().clone()
        return self.bn(x) + torch.zeros_like(var) + var.new_zeros(4)


def test_running_statistics_that_are_kept_are_not_told_of():
    assert bnuq.doctor(bnuq.convert(Logging().eval()), torch.randn(6, 4)).warnings == ()


class Flow(nn.Module):
    """A normalising flow: the log-determinant of its batch norm, by a buffer of it."""

    def __init__(self):
        super().__init__()
        self.bn, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.other(self.bn(x)) - torch.stack(list(self.bn.buffers())[1:2]).log().sum()


def test_running_statistics_out_of_buffers_are_told_of():
    model, x = bnuq.convert(Flow().eval()), torch.randn(6, 4)
    text = "the forward reads the running statistics of bn by itself: there they are those of"
    assert [w for w in bnuq.doctor(model, x).warnings if text in w]
    bnuq.collect(model, [torch.randn(20, 4) for _ in range(3)], progress=False)
    with pytest.warns(UserWarning, match=f"predict: {text}"):
        bnuq.predict(model, x, likelihood="gaussian", num_samples=3)
    bnuq.predict(model, x, likelihood="gaussian", num_samples=3)  # once


@pytest.mark.parametrize("rows, warns", [(62, False), (52, True), (48, False)])
def test_small_last_batches_are_warned_of(rows, warns):
    model = bnuq.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).eval()
    data = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data), batch_size=24, shuffle=True)
    with pytest.warns(UserWarning, match="more than a tenth"):
        bank = bnuq.collect(model, loader, 6, progress=False)
    last = f"2 of the bank's 6 snapshots have {rows % 24} rows, the others 24."
    assert any(last in text for text in bnuq.doctor(model, data).warnings) == warns
    assert (f"24 rows (2 of {rows % 24}) out of {rows}" in repr(bank)) == (rows % 24 > 0)
