"""`collect`: the numbers that it stores, against train mode and against a hand loop in float64."""

import copy

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq


class Net(nn.Module):
    """Convolution, BN, dropout, a second BN behind it, a dense BN:
    what a deeper layer sees matters."""

    def __init__(self, p=0.5):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, eps=1e-3)
        self.conv2, self.bn2 = nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3, affine=False)
        self.dropout = nn.Dropout(p)
        self.dense, self.bn3 = nn.Linear(3 * 5 * 5, 6), nn.BatchNorm1d(6, momentum=None)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(self.dropout(x))))
        return self.bn3(self.dense(x.flatten(1)))


LAYERS = ("bn1", "bn2", "bn3")


def make_net(p=0.5):
    torch.manual_seed(1)
    net = Net(p)
    with torch.no_grad():
        net.bn1.weight.uniform_(0.5, 2)
        net.bn1.bias.normal_()
    return net


def images(rows=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 5, 5, generator=generator) * 2 + 1


def batches(num=5, rows=8):
    return list(images(num * rows).split(rows))


def statistics_by_hand(x):
    """Mean and biased variance of each channel in float64, one channel after the other."""
    means, variances = [], []
    for c in range(x.shape[1]):
        values = x[:, c].double().flatten()
        mean = values.sum() / values.numel()
        means.append(mean)
        variances.append(((values - mean) ** 2).sum() / values.numel())
    return torch.stack(means), torch.stack(variances)


def forward_by_hand(net, x):
    """[(mean, var) of each BN layer] of one batch in float64, each layer behind the ones before."""
    found = []

    def batch_norm(layer, x):
        mean, var = statistics_by_hand(x)
        found.append((mean, var))
        shape = (1, -1) + (1,) * (x.dim() - 2)
        y = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
        if layer.weight is None:
            return y
        return y * layer.weight.view(shape) + layer.bias.view(shape)

    x = torch.relu(batch_norm(net.bn1, net.conv1(x)))
    x = torch.relu(batch_norm(net.bn2, net.conv2(x)))
    batch_norm(net.bn3, net.dense(x.flatten(1)))
    return found


def test_equals_a_hand_loop_in_float64(device):
    net = make_net().to(device)
    bank = bnuq.collect(bnuq.convert(net), batches(), 5)
    double = copy.deepcopy(net).double()
    exact = bnuq.collect(bnuq.convert(double), [x.double() for x in batches()], 5)
    with torch.no_grad():
        for b, x in enumerate(batches()):
            expected = forward_by_hand(double, x.double().to(device))
            for name, (mean, var) in zip(LAYERS, expected, strict=True):
                assert bank.mean[name].dtype == bank.var[name].dtype == torch.float32
                assert exact.mean[name].dtype == exact.var[name].dtype == torch.float64
                for found, rtol in ((bank, 1e-4), (exact, 1e-11)):
                    close = {"rtol": rtol, "atol": rtol / 10, "check_dtype": False}
                    torch.testing.assert_close(found.mean[name][b], mean.cpu(), **close)
                    torch.testing.assert_close(found.var[name][b], var.cpu(), **close)


def test_equals_batch_norm_in_train_mode(device):
    net = make_net().to(device)
    bank = bnuq.collect(bnuq.convert(net), batches(), 5)
    net.train()
    net.dropout.eval()
    for name in LAYERS:
        getattr(net, name).momentum = 1.0
    for b, x in enumerate(batches()):
        net(x.to(device))
        for name in LAYERS:
            layer, n = getattr(net, name), bank.count[name][b].item()
            # torch keeps the unbiased variance.
            biased_var = layer.running_var.cpu() * ((n - 1) / n)
            torch.testing.assert_close(bank.mean[name][b], layer.running_mean.cpu())
            torch.testing.assert_close(bank.var[name][b], biased_var)
    assert bank.names == LAYERS and bank.unused == ()
    assert bank.count["bn1"].tolist() == bank.count["bn2"].tolist() == [8 * 25] * 5
    assert bank.count["bn3"].tolist() == [8] * 5
    assert (len(bank), bank.batch_size, bank.dataset_size, bank.disjoint) == (5, 8, 40, 1.0)
    assert bank.metadata == {"torch": str(torch.__version__), "bnuq_ext": bnuq.__version__}


def test_outputs_are_bit_for_bit_those_of_train_mode():
    net = make_net()
    model, outputs = bnuq.convert(net), []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    bnuq.collect(model, batches(), 5)
    net.train()
    net.dropout.eval()
    for x, output in zip(batches(), outputs, strict=True):
        assert torch.equal(output, net(x))
        assert not output.requires_grad and output.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
def test_activations_of_16_bits_have_the_statistics_of_train_mode(affine, tracked, dtype):
    torch.manual_seed(0)
    options = {"affine": affine, "track_running_stats": tracked}
    net = nn.Sequential(nn.BatchNorm1d(4, **options), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, outputs = bnuq.convert(net), []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    x = (10 + 0.3 * torch.randn(64, 4)).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        bnuq.collect(model, [x, x + 1], 2)
        for given, output in zip((x, x + 1), outputs, strict=True):
            assert torch.equal(output, net.train()(given))


@pytest.mark.parametrize(
    "layer, shape, count",
    [
        (nn.BatchNorm1d(3), (7, 3), 7),
        (nn.BatchNorm1d(3), (7, 3, 4), 28),
        (nn.BatchNorm2d(3), (2, 3, 4, 5), 40),
        (nn.BatchNorm2d(3), (1, 3, 2, 1), 2),
        (nn.BatchNorm3d(3), (2, 3, 2, 3, 4), 48),
        (nn.BatchNorm1d(3, affine=False, track_running_stats=False), (7, 3), 7),
        (nn.SyncBatchNorm(3), (5, 3, 4), 20),
    ],
    ids=str,
)
def test_every_kind_of_layer(layer, shape, count):
    torch.manual_seed(0)
    x = torch.randn(shape) * 3 + 2
    bank = bnuq.collect(bnuq.convert(layer), [x], 1)
    mean, var = statistics_by_hand(x)
    assert bank.names == ("",) and bank.count[""].tolist() == [count]
    torch.testing.assert_close(bank.mean[""][0].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bank.var[""][0].double(), var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """A mean of 1000 with a spread of 1 is lost in a sum of halves."""
    torch.manual_seed(0)
    x = (torch.randn(512, 2) * 8 + 1000).to(dtype)
    bank = bnuq.collect(bnuq.convert(nn.BatchNorm1d(2)).to(dtype), [x], 1)
    mean, var = statistics_by_hand(x)
    assert bank.mean[""].dtype == torch.float32
    torch.testing.assert_close(bank.mean[""][0].double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(bank.var[""][0].double(), var, rtol=1e-4, atol=0)


def test_channels_last_and_other_strides():
    model = bnuq.convert(make_net())
    bank = bnuq.collect(model, batches(), 5)
    strided = [x.contiguous(memory_format=torch.channels_last) for x in batches()]
    flipped = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in batches()]
    for data in (strided, flipped):
        other = bnuq.collect(model, data, 5)
        for name in LAYERS:
            torch.testing.assert_close(other.mean[name], bank.mean[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other.var[name], bank.var[name], rtol=1e-4, atol=1e-5)


def test_dropout_is_off():
    without = bnuq.collect(bnuq.convert(make_net(0.0)).train(), batches(), 5)
    assert bnuq.collect(bnuq.convert(make_net(0.99)).train(), batches(), 5).equal(without)


def test_other_batch_norm_uses_its_running_statistics():
    net = make_net()
    net.bn1.running_mean.fill_(3.0)
    net.bn1.running_var.fill_(0.25)
    model = bnuq.convert(net, filter_fn=lambda name, module: name != "bn1").train()
    bank = bnuq.collect(model, batches(), 5)
    assert bank.names == ("bn2", "bn3")
    net.eval()
    for b, x in enumerate(batches()):
        mean, var = statistics_by_hand(net.conv2(torch.relu(net.bn1(net.conv1(x)))))
        torch.testing.assert_close(bank.mean["bn2"][b].double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bank.var["bn2"][b].double(), var, rtol=1e-4, atol=1e-5)
    assert model.bn1.num_batches_tracked == 0 and torch.all(model.bn1.running_mean == 3.0)


class Shared(nn.Module):
    """One BN in two slots, called three times, each with another scale."""

    def __init__(self, calls=3):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(4)
        self.calls = calls

    def forward(self, x):
        outputs = [self.first(x * 2), self.second(x * 3 + 1), self.first(x - 5)]
        return sum(outputs[: self.calls])


def test_a_snapshot_per_call():
    torch.manual_seed(0)
    data = [torch.randn(6, 4) for _ in range(3)]
    model = bnuq.convert(Shared())
    bank = bnuq.collect(model, data, 3)
    assert bank.names == ("first", "first#1", "first#2")
    for b, x in enumerate(data):
        for key, seen in zip(bank.names, (x * 2, x * 3 + 1, x - 5), strict=True):
            mean, var = statistics_by_hand(seen)
            torch.testing.assert_close(bank.mean[key][b].double(), mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(bank.var[key][b].double(), var, rtol=1e-5, atol=1e-6)
    assert model.first.bank is bank and model.first.bank_name == "first"


def test_every_batch_must_make_the_same_calls():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x):
            for _ in range(x.shape[0] - 4):
                x = self.bn(x)
            return x

    model = bnuq.convert(Growing())
    data = [torch.randn(rows, 4) for rows in (6, 6, 7)]
    error = (
        r"collect: batch 2 must make the 2 calls of the ones before \(their number may depend on "
        r"that of the rows \(drop_last=True\), or on values\), got "
    )
    with pytest.raises(ValueError, match=error + "one more, of 'bn#2'$"):
        bnuq.collect(model, data, 3)
    with pytest.raises(ValueError, match=error + "none of 'bn'$"):
        bnuq.collect(model, [*data[:2], torch.randn(4, 4)], 3)
    assert model.bn.bank is None


def test_a_name_like_that_of_a_second_call_is_refused():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.add_module("bn#1", nn.BatchNorm1d(4))

        def forward(self, x):
            return self.get_submodule("bn#1")(self.bn(self.bn(x)))

    error = "collect: names of layers must differ from those of second calls, got 'bn#1'"
    with pytest.raises(ValueError, match=error):
        bnuq.collect(bnuq.convert(Named()), [torch.randn(6, 4)], 1)


class Frozen(bnuq.nn.Stochastic, nn.Module):
    """An adapter's layer: no num_features, an eps of 0,
    and something to do after the normalisation."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.tensor([0.5, 2.0]))

    def check_input(self, x):
        assert x.dim() == 2

    def affine_parameters(self):
        return self.weight, self.bias, 0.0

    def finish(self, y):
        return y.abs()


def test_layers_of_adapters():
    x = torch.randn(7, 2)
    model, outputs = nn.Sequential(Frozen()), []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    bank = bnuq.collect(model, [x], 1)
    mean, var = statistics_by_hand(x)
    torch.testing.assert_close(bank.mean["0"][0].double(), mean, rtol=1e-5, atol=1e-6)
    expected = ((x - mean) / var.sqrt() * model[0].weight + model[0].bias).abs()
    torch.testing.assert_close(outputs[0].double(), expected, rtol=1e-5, atol=1e-6)
    wide = bnuq.Bank({"0": torch.ones(2, 3)}, {"0": torch.ones(2, 3)}, 4, batch_size=4)
    with pytest.raises(ValueError, match="attach: bank.mean.'0'. must have 2 channels, got 3"):
        bnuq.attach(model, wide)


@pytest.mark.parametrize("shape", [(8, 0), (0, 3), (2, 3, 0), (1, 3)], ids=str)
def test_shapes_without_statistics(shape):
    layer = bnuq.convert(nn.BatchNorm1d(max(shape[1], 1)))
    with pytest.raises(ValueError, match="collect: data must hold a batch with two finite values"):
        bnuq.collect(layer, [torch.randn(shape)], 1)


class Auxiliary(nn.Module):
    """A second head that runs in train mode only."""

    def __init__(self):
        super().__init__()
        self.bn, self.aux = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def forward(self, x):
        x = self.bn(x)
        return (x, self.aux(x)) if self.training else x


def test_layers_that_are_not_called(tmp_path):
    model = bnuq.convert(Auxiliary()).train()
    bank = bnuq.collect(model, [torch.randn(6, 4)] * 2, 2)
    assert bank.names == ("bn",) and bank.unused == ("aux.1",)
    bank.save(tmp_path / "a.bank")
    other = bnuq.convert(Auxiliary())
    bnuq.attach(other, bnuq.Bank.load(tmp_path / "a.bank"))
    assert other.bn.bank.equal(bank) and other.aux[1].bank is other.bn.bank
    model.bn = nn.Identity()
    error = (
        "collect: model must call its stochastic layers in eval, got calls of none "
        r"\(it may run another network than the one that was converted\)"
    )
    with pytest.raises(ValueError, match=error):
        bnuq.collect(model, [torch.randn(6, 4)], 1)


# torch's own warning
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@compiling
def test_a_compiled_model():
    model = bnuq.convert(make_net())
    bank = bnuq.collect(model, batches(), 5)
    compiled = torch.compile(model, backend="eager")
    compiled(images(4))
    other = bnuq.collect(compiled, batches(), 5)
    assert other.equal(bank) and model.bn1.bank is other


@compiling
def test_a_compiled_layer_keeps_its_name():
    model = bnuq.convert(make_net())
    bank = bnuq.collect(model, batches(), 5)
    model.bn1 = torch.compile(model.bn1, backend="eager")
    assert bnuq.collect(model, batches(), 5).equal(bank)
    bnuq.attach(model, bank)


def test_batches_of_one_row_from_a_data_set():
    """A convolution's batch norm has many values a channel in one row; a dense one has not."""
    torch.manual_seed(0)
    net = bnuq.convert(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).eval())
    rows = images(20)
    with torch.no_grad():
        every = [statistics_by_hand(net[0](row[None])) for row in rows]
    bank = bnuq.collect(net, torch.utils.data.TensorDataset(rows), 12, batch_size=1, progress=False)
    assert (len(bank), bank.batch_size, bank.dataset_size) == (12, 1, 20)
    for mean, var in zip(bank.mean["1"], bank.var["1"], strict=True):
        off = [max((mean - m).abs().max(), (var - v).abs().max()) for m, v in every]
        assert min(off) < 1e-5
