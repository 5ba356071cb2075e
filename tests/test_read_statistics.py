"""A model that reads the running statistics of a stochastic layer finds those of the replica."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bnuq_ext as bnuq


class Flow(nn.Module):
    """A step of a normalising flow: what it makes of x, and the log-determinant of that."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.other(self.bn(self.linear(x)))
        log_det = -(self.bn.running_var + self.bn.eps).log().sum() / 2
        return torch.cat([y, log_det.expand(x.shape[0], 1)], 1)


class Residue(nn.Module):
    """What a layer gives less what is computed with the statistics that it shows: zero."""

    def __init__(self):
        super().__init__()
        self.first, self.bn = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, affine=False)

    def forward(self, x):
        h, bn = self.first(x), self.bn
        return bn(h) - (h - bn.running_mean) / (bn.running_var + bn.eps).sqrt()


class Twice(nn.Module):
    """A layer that is called twice, read before its calls, between them and after."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        read = [self.bn.running_mean]
        h = self.bn(x)
        read.append(self.bn.running_mean)
        h = self.bn(h**2)
        read.append(self.bn.running_mean)
        return h + torch.cat(read).sum()


def trained(model: nn.Module) -> nn.Module:
    """In eval, with running statistics of its own."""
    for _ in range(20):
        model(3 * torch.randn(16, 4) + 1)
    return model.eval()


def batches(dtype=torch.float32) -> list[torch.Tensor]:
    return [2 * torch.randn(20, 4, dtype=dtype) - 1 for _ in range(7)]


def with_bank(original: nn.Module, dtype=torch.float32) -> tuple[nn.Module, bnuq.Bank]:
    model = bnuq.convert(original.to(dtype))
    return model, bnuq.collect(model, batches(dtype), progress=False)


@torch.no_grad()
def loop(original: nn.Module, bank: bnuq.Bank, snapshots: torch.Tensor, x) -> torch.Tensor:
    """The original in eval with each snapshot in its running buffers."""
    model, outputs = copy.deepcopy(original), []
    for s in snapshots:
        for name in bank.mean:
            layer = model.get_submodule(name)
            layer.running_mean.copy_(bank.mean[name][s])
            layer.running_var.copy_(bank.var[name][s])
        outputs.append(model(x))
    return torch.stack(outputs)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_log_determinants_are_the_replicas(strategy):
    original = trained(Flow())
    (model, bank), x = with_bank(original), torch.randn(6, 4)
    settings = {"num_samples": 9, "seed": 3, "keep_samples": True, "strategy": strategy}
    found = bnuq.predict(model, x, likelihood="gaussian", **settings)
    expected = loop(original, bank, found.snapshots, x)
    torch.testing.assert_close(found.samples, expected, rtol=1e-5, atol=1e-5)
    assert expected[:, 0, -1].std() > 0.05  # the determinants differ


def test_such_a_model_does_not_fold():
    model, _ = with_bank(trained(Flow()))
    settings = {"likelihood": "gaussian", "num_samples": 4}
    with pytest.raises(
        ValueError, match="reads the running_var of bn, which is another in each replica"
    ):
        bnuq.predict(model, torch.randn(6, 4), strategy="folded", **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal", "batch"])
def test_every_sampler_shows_what_it_normalises_with(sampler, dtype):
    model, _ = with_bank(trained(Residue()), dtype)
    x = torch.randn(6, 4, dtype=dtype)
    settings = {"loader": batches(dtype)} if sampler == "batch" else {}
    settings |= {"num_samples": 5, "sampler": sampler, "keep_samples": True, "seed": 1}
    if sampler not in ("bank", "batch"):
        settings["batch_size"] = 30
    found = bnuq.predict(model, x, likelihood="gaussian", **settings)
    assert found.samples.abs().max() < (1e-5 if dtype == torch.float32 else 1e-12)


class Undone(nn.Module):
    """Undoes its first layer with the statistics that this shows, before the next."""

    def __init__(self):
        super().__init__()
        self.bn, self.next = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)

    def forward(self, x):
        bn = self.bn
        return self.next(bn(x) * (bn.running_var + bn.eps).sqrt() + bn.running_mean)


def test_a_collection_shows_those_of_the_batch():
    _, bank = with_bank(trained(Undone()))
    for kind in (bank.mean, bank.var):
        torch.testing.assert_close(kind["next"], kind["bn"], rtol=1e-5, atol=1e-5)


def test_a_query_in_its_batch_finds_those_of_the_two():
    original = trained(Undone())
    (model, _), x, loader = with_bank(original), torch.randn(3, 4), batches()
    settings = {"sampler": "batch", "query": "in", "loader": loader, "keep_samples": True}
    found = bnuq.predict(model, x, likelihood="gaussian", num_samples=3, **settings)
    for batch, sample in zip(loader, found.samples, strict=False):
        joint = [torch.cat([row[None], batch[:-1]]) for row in x]
        layer = copy.deepcopy(original.next).train()
        expected = torch.stack([layer(rows)[0] for rows in joint])
        torch.testing.assert_close(sample, expected.detach(), rtol=1e-5, atol=1e-5)


class Writing(nn.Module):
    """Writes into what it reads, after the call."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.bn(x)
        self.bn.running_mean.zero_()
        self.bn.running_var.fill_(1)
        return y


def test_what_a_model_writes_there_is_not_in_the_bank():
    given, plain = batches(), bnuq.convert(nn.Sequential(nn.BatchNorm1d(4)))
    model = bnuq.convert(trained(Writing()))
    bank = bnuq.collect(model, given, progress=False)
    expected = bnuq.collect(plain, given, progress=False)
    torch.testing.assert_close(bank.mean["bn"], expected.mean["0"])
    torch.testing.assert_close(bank.var["bn"], expected.var["0"])
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 0, "strategy": "loop"}
    first = bnuq.predict(model, given[0], **options).mean
    torch.testing.assert_close(bnuq.predict(model, given[0], **options).mean, first)
    torch.testing.assert_close(bank.mean["bn"], expected.mean["0"])


def test_each_call_has_its_own():
    original = trained(Twice())
    model, bank = with_bank(original)
    x = torch.randn(6, 4)
    settings = {"num_samples": 3, "seed": 2, "keep_samples": True}
    found = bnuq.predict(model, x, likelihood="gaussian", **settings)
    for s, sample in zip(found.snapshots, found.samples, strict=True):
        (m0, m1), (v0, v1) = (
            [table[key][s] for key in ("bn", "bn#1")] for table in (bank.mean, bank.var)
        )
        layer = original.bn
        h = F.batch_norm(F.batch_norm(x, m0, v0, layer.weight, layer.bias) ** 2, m1, v1)
        expected = h * layer.weight + layer.bias + 2 * m0.sum() + m1.sum()
        torch.testing.assert_close(sample, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_body_of_replicas_shows_one_or_refuses():
    original = trained(Flow())
    (model, bank), x = with_bank(original), torch.randn(6, 4)
    snapshot = bnuq.predict(model, x, likelihood="gaussian", num_samples=1, seed=5).snapshots
    with bnuq.replicas(model, 1, 5):
        own = model.bn.running_var
        found = model(x)
    torch.testing.assert_close(found, loop(original, bank, snapshot, x)[0], rtol=1e-5, atol=1e-5)
    assert own is model.bn._buffers["running_var"]
    text = "reads the running_var of bn, which is another in each replica"
    with bnuq.replicas(model, 3, 5), pytest.raises(ValueError, match=text):
        model(x)


def test_another_model_in_the_body_shows_its_own():
    (model, _), other = with_bank(trained(Flow())), bnuq.convert(trained(Flow()))
    x = torch.randn(6, 4)
    expected = other(x)
    with bnuq.replicas(model, 1, 5):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.scale = (
            inner,
            nn.Parameter(torch.ones(5 if isinstance(inner, Flow) else 4)),
        )

    def forward(self, x):
        return checkpoint(lambda x: self.inner(x) * self.scale, x, use_reentrant=False)


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_backward_computes_again_reads_the_same(inside):
    model, _ = with_bank(trained(Checkpointed(Flow())))
    with bnuq.replicas(model, 1, 5):
        y = model(torch.randn(6, 4))
        if inside:
            y.square().sum().backward()
    if not inside:
        y.square().sum().backward()
    inner = y.detach() / model.scale.detach()  # whose last column is the determinant
    torch.testing.assert_close(model.scale.grad, 2 * inner.square().sum(0), rtol=1e-5, atol=1e-5)


def test_several_calls_that_are_computed_again_are_refused():
    model, _ = with_bank(trained(Checkpointed(Twice())))
    text = "layer 'inner.bn' must be called once in a forward that is computed again, got 2 calls"
    with bnuq.replicas(model, 1, 5):
        y = model(torch.randn(6, 4))
    with pytest.raises(ValueError, match=text):
        y.sum().backward()


def test_reading_again_of_a_layer_that_was_called_twice_is_refused():
    class Reading(Twice):
        def forward(self, x):
            h = self.bn(self.bn(x).requires_grad_())
            return checkpoint(lambda h: h * self.bn.running_mean.exp(), h, use_reentrant=False)

    model, _ = with_bank(trained(Reading()))
    with bnuq.replicas(model, 1, 5):
        y = model(torch.randn(6, 4))
    with pytest.raises(ValueError, match="layer 'bn' must be called once in a forward that is"):
        y.sum().backward()


def test_a_body_inside_of_another_shows_those_of_its_outer_model():
    (model, _), (other, _) = (with_bank(trained(Flow())) for _ in range(2))
    x = torch.randn(6, 4)
    with bnuq.replicas(model, 1, 5):
        expected = model(x)
        with bnuq.replicas(other, 1, 5):
            assert torch.equal(model(x), expected)


class Aside(nn.Module):
    """Reads the statistics of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.bn, self.aside = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(x) * self.aside.running_var


def test_those_of_a_layer_that_is_not_called_are_its_own():
    original = trained(Aside())
    original.aside.running_var.copy_(torch.arange(4) + 2)
    (model, bank), x = with_bank(original), torch.randn(6, 4)
    assert bank.unused == ("aside",)
    with pytest.warns(UserWarning, match="reads the running statistics of aside by itself"):
        found = bnuq.predict(model, x, likelihood="gaussian", num_samples=5, keep_samples=True)
    expected = loop(original, bank, found.snapshots, x)
    torch.testing.assert_close(found.samples, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_have_the_dtype_of_the_layers_own(dtype):
    class Typed(Flow):
        def forward(self, x):
            read.append((self.bn(x).dtype, self.bn.running_mean.dtype, self.bn.running_var.dtype))
            return x

    read: list[tuple] = []
    model = bnuq.convert(Typed().to(dtype).eval())
    bnuq.collect(model, batches(dtype), progress=False)
    bnuq.predict(model, batches(dtype)[0], likelihood="gaussian", num_samples=2, strategy="loop")
    assert len(read) > 8 and set(read) == {(dtype,) * 3}


def test_outside_of_a_prediction_they_are_the_layers_own():
    model, _ = with_bank(trained(Flow()))
    buffers = model.bn._buffers
    assert model.bn.running_mean is buffers["running_mean"]
    before = model.bn.running_var.clone()
    model.train()(torch.randn(8, 4))
    assert not torch.equal(model.bn.running_var, before)
    assert bnuq.convert(nn.BatchNorm1d(4, track_running_stats=False)).running_mean is None


def test_a_compiled_model_reads_the_same():
    original = trained(Flow())
    (model, bank), x = with_bank(original), torch.randn(6, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), original(x))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    settings = {"num_samples": 4, "seed": 3, "keep_samples": True}
    found = bnuq.predict(compiled, x, likelihood="gaussian", **settings)
    expected = loop(original, bank, found.snapshots, x)
    torch.testing.assert_close(found.samples, expected, rtol=1e-5, atol=1e-5)


def test_doctor_and_predict_say_nothing_of_it(recwarn):
    model, _ = with_bank(trained(Flow()))
    x = torch.randn(6, 4)
    assert not [w for w in bnuq.doctor(model, x).warnings if "running statistics of" in w]
    bnuq.predict(model, x, likelihood="gaussian", num_samples=3)
    assert not [w for w in recwarn if "running statistics of" in str(w.message)]
