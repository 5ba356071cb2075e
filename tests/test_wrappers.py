"""Models inside torch's data-parallel wrappers, and weights of which a process holds but a part."""

import pytest
import torch
import torch.distributed as dist
from predicting import DATA, X, make_model, predict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from zoo import data_parallel

import bnuq_ext as bnuq


@pytest.fixture
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "data parallel": data_parallel,
    "distributed": DistributedDataParallel,
    "compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_predictions_do_without_the_wrapper(wrap, alone, monkeypatch):
    """Its forward waits for the buffers of other processes, which may not predict."""
    model = make_model()
    expected = predict(model)
    plain = bnuq.plug_in(model, X, likelihood="categorical")
    wrapped = WRAPPERS[wrap](model)

    def refused(*args):
        raise AssertionError("the wrapper's forward was called")

    for cls in (nn.DataParallel, DistributedDataParallel):
        monkeypatch.setattr(cls, "forward", refused)
    assert torch.equal(predict(wrapped).mean, expected.mean)
    assert torch.equal(bnuq.plug_in(wrapped, X, likelihood="categorical").mean, plain.mean)
    assert str(bnuq.doctor(wrapped, X)) == str(bnuq.doctor(model, X))


def test_what_collects_refuses_the_wrapper(alone):
    wrapped = DistributedDataParallel(make_model())
    data = torch.utils.data.TensorDataset(DATA)
    for op, call in {
        "collect": lambda: bnuq.collect(wrapped, data, batch_size=16),
        "fit_batch_size": lambda: bnuq.fit_batch_size(wrapped, data, [4], likelihood="categorical"),
        "statistics_normality": lambda: bnuq.statistics_normality(wrapped, data, 16),
    }.items():
        with pytest.raises(ValueError, match=f"^{op}: model must not be wrapped for several devi"):
            call()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_loss_goes_through_the_wrapper(alone, num_samples):
    def gradients(wrap):
        torch.manual_seed(0)
        layers = bnuq.BayesLinear(4, 6), nn.Tanh(), bnuq.BayesLinear(6, 3)
        model, x, y = nn.Sequential(*layers), torch.randn(8, 4), torch.arange(8) % 3
        for seed in (1, 2):
            options = dict(num_samples=num_samples, batch_weight=0.1, seed=seed)
            bnuq.elbo_loss(wrap(model), x, y, **options).loss.backward()
        return [p.grad for p in model.parameters()]

    calls = []

    class Counted(DistributedDataParallel):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    for actual, expected in zip(gradients(Counted), gradients(lambda m: m), strict=True):
        torch.testing.assert_close(actual, expected)
    assert calls


@pytest.mark.parametrize("name", ["weight_mu", "weight_rho"])
@pytest.mark.parametrize("kind", ["sharded", "flat", "freed"])
def test_weights_in_parts_are_refused(alone, name, kind):
    """FullyShardedDataParallel leaves a flat part in the layer, or one without memory;
    fully_shard one that says the whole's shape."""
    net = nn.Sequential(bnuq.BayesLinear(4, 6), bnuq.BayesLinear(6, 3))
    whole = getattr(net[1], name).detach()
    part, got = whole.flatten()[:9], r"Parameter \[9\]"
    if kind == "freed":
        part, got = whole.clone(), r"Parameter \[3, 6\]"
        part.untyped_storage().resize_(0)
    if kind == "sharded":
        part = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        got = r"DTensor \[3, 6\]"
    setattr(net[1], name, nn.Parameter(part))
    requirement = r"have its weights whole \(gather what is sharded among processes first\)"
    calls = {
        "kl_divergence": bnuq.kl_divergence,
        "posterior_summary": bnuq.posterior_summary,
        "prune": lambda net: bnuq.prune(net, 0.5),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=f"^{op}: layer '1' must {requirement}, got {got}$"):
            call(net)
    assert net[0].weight_mask is None


class Doubled(nn.Module):
    """Hands on what it wraps has, as FullyShardedDataParallel does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_wrapper_around_a_compiled_model_is_not_taken_for_it():
    model = make_model()
    options = dict(likelihood="gaussian", num_samples=3, seed=1, keep_samples=True)
    expected = 2 * bnuq.predict(model, X, **options).samples
    wrapped = Doubled(torch.compile(model, backend="eager"))
    torch.testing.assert_close(bnuq.predict(wrapped, X, **options).samples, expected)
    with torch.no_grad(), bnuq.replicas(wrapped, 3, seed=1):  # with gradients torch 2.10 warns
        torch.testing.assert_close(wrapped(X), expected.flatten(0, 1))


def test_a_wrapper_that_knows_of_no_new_parameters_is_refused(alone):
    model = nn.Sequential(nn.Linear(4, 3))
    message = "to_bayesian: model must be wrapped afterwards .*, got a DistributedDataParallel"
    for wrapped in (DistributedDataParallel(model), nn.Sequential(DistributedDataParallel(model))):
        with pytest.raises(ValueError, match=message):
            bnuq.to_bayesian(wrapped)
    DistributedDataParallel(bnuq.to_bayesian(model))


@pytest.mark.filterwarnings("ignore:.*was not found:UserWarning")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_processes_that_wait_for_each_other_make_the_same_forwards(alone, wrap):
    """Of a model that needs a proof, which other rows may fail."""
    calls = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = bnuq.BayesLinear(4, 3, rho_init=-1.0)

        def forward(self, x):
            calls.append(len(x))
            return self.layer(x).tanh()

    model, x, y = Net(), torch.randn(8, 4), torch.arange(8) % 3
    options = dict(num_samples=4, batch_weight=0.1, seed=1)
    expected = bnuq.elbo_loss(model, x, y, **options).loss
    wrapped = wrap(model)
    for _ in range(2):
        calls.clear()
        torch.testing.assert_close(bnuq.elbo_loss(wrapped, x, y, **options).loss, expected)
        assert calls == [8] * 4
    if wrap is fully_shard:  # `predict` leaves the other aside
        calls.clear()
        pred = bnuq.predict(wrapped, x, likelihood="categorical", num_samples=4)
        assert calls == [8] * 4 and pred.mean.shape == (8, 3)


def test_a_tensor_without_memory_is_no_state():
    """As FullyShardedDataParallel leaves weights between forwards."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.freed = bnuq.BayesLinear(4, 3), torch.zeros(9)
            self.freed.untyped_storage().resize_(0)

        def forward(self, x):
            return self.layer(x).tanh()

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    assert bnuq.elbo_loss(Net(), x, y, num_samples=3, batch_weight=0.1).loss.isfinite()
    assert bnuq.predict(Net(), x, likelihood="categorical").mean.isfinite().all()


def test_a_sharded_model_is_converted_in_place(alone):
    model = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    message = (
        r"^convert: model must be one that copy.deepcopy can copy \(inplace=True needs no copy\)"
    )
    with pytest.raises(TypeError, match=message):
        bnuq.convert(model)
    assert isinstance(bnuq.convert(model, inplace=True)[1], bnuq.StochasticBatchNorm1d)


def test_replicas_of_a_wrapper_are_those_of_its_module(alone):
    """A trial would go through the wrapper's forward, which waits for other processes."""
    model = bnuq.to_bayesian(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    wrapped, x = DistributedDataParallel(model), torch.randn(5, 4)
    message = (
        "replicas: model must be the .module of the wrapper, .*, got a DistributedDataParallel"
    )
    with pytest.raises(ValueError, match=message), bnuq.replicas(wrapped, 3, seed=0):
        pass
    with bnuq.replicas(wrapped.module, 3, seed=0):
        y = wrapped(x)
    with bnuq.replicas(model, 3, seed=0):
        torch.testing.assert_close(y, model(x))


def test_doctor_is_told_nothing_by_a_wrapper(alone):
    """It sends the running statistics to the other processes, which is no reading of the model."""
    model = bnuq.convert(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval())
    wrapped = DistributedDataParallel(model)
    assert bnuq.doctor(wrapped, torch.randn(6, 4)).warnings == ()
