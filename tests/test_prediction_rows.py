"""A prediction at some of the inputs, on another device, from a file; and of what are no logits."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import Prediction

ROWS = {
    "an index": (3, [3]),
    "the last": (-1, [6]),
    "a slice": (slice(1, None, 2), [1, 3, 5]),
    "a list": ([4, 0, 4], [4, 0, 4]),
    "none": ([], []),
    "indices": (torch.tensor([2, 6]), [2, 6]),
    "a mask": (torch.arange(7) > 4, [5, 6]),
}
SHAPES = {"categorical": [(4, 7, 3), (4, 7, 3, 2)], "gaussian": [(4, 7), (4, 7, 1), (4, 7, 2, 3)]}


def samples_of(shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("rows", "chosen"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("likelihood", SHAPES)
def test_rows_of_a_prediction_are_its_prediction_at_these(likelihood, rows, chosen):
    for shape in SHAPES[likelihood]:
        samples = samples_of(shape)
        pred = Prediction.from_samples(samples, likelihood)
        pred.targets, pred.snapshots = torch.arange(7), torch.tensor([3, 1, 2, 0])
        part = pred[rows]
        assert len(pred) == 7 and len(part) == len(chosen)
        assert (part.likelihood, part.num_samples) == (likelihood, 4)
        assert part.targets.tolist() == chosen and part.snapshots.tolist() == [3, 1, 2, 0]
        assert torch.equal(part.samples, samples[:, chosen])
        expected = Prediction.from_samples(samples[:, chosen], likelihood)
        for name in ("mean", "variance", "entropy", "mutual_information", "total_variance"):
            found, other = getattr(part, name), getattr(expected, name)
            assert (found is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (7, 1), (7, 2)])
def test_rows_have_their_noise(shape):
    noise = torch.rand(shape) + 1
    pred = Prediction.from_samples(samples_of((4, 7, 2)), "gaussian", noise)
    assert torch.equal(pred[[5, 2]].total_variance, pred.total_variance[[5, 2]])
    assert Prediction.from_samples(samples_of((4, 7)), "gaussian", 0.5)[2:4].noise_var == 0.5


def test_rows_are_copies_and_other_targets_are_left_out():
    pred = Prediction.from_samples(samples_of((4, 7, 2)), "gaussian")
    before = copy.deepcopy(pred)
    pred.targets = [{"boxes": torch.ones(7)}]
    part = pred[:]
    for name in ("mean", "variance", "samples"):
        getattr(part, name).zero_()
        assert torch.equal(getattr(pred, name), getattr(before, name))
    assert part.targets is None
    pred.targets = torch.tensor(3)
    assert pred[:].targets is None


@pytest.mark.parametrize("rows", [7, -8, [0, 9], torch.ones(6, dtype=torch.bool)])
def test_rows_that_are_not_there(rows):
    with pytest.raises(IndexError):
        Prediction.from_samples(samples_of((4, 7, 2)), "gaussian")[rows]


def test_a_loop_over_a_prediction_is_one_over_its_rows():
    pred = Prediction.from_samples(samples_of((4, 7, 3)), "categorical")
    assert torch.equal(torch.cat([row.mean for row in pred]), pred.mean)


def test_on_another_device():
    pred = Prediction.from_samples(samples_of((4, 7, 2)), "gaussian", torch.ones(7, 1))
    pred.targets = [torch.ones(3), {"y": torch.ones(4)}]
    pred.note = "an attribute of the caller's"
    moved = pred.to("meta")
    values = [moved.mean, moved.variance, moved.samples, moved.noise_var, moved.total_variance]
    values += [moved.targets[0], moved.targets[1]["y"]]
    assert all(value.is_meta for value in values) and not pred.mean.is_meta
    assert repr(moved) == repr(pred) and moved.snapshots is None


def test_torch_load_takes_one():
    pred = Prediction.from_samples(samples_of((4, 7, 3)), "categorical")
    pred.targets = torch.arange(7)
    file = io.BytesIO()
    torch.save({"pred": pred}, file)
    file.seek(0)
    loaded = torch.load(file)["pred"]
    for name, value in vars(pred).items():
        found = getattr(loaded, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


class Net(nn.Module):
    def __init__(self, last: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), last)

    def forward(self, x):
        return self.layers(x)


TEXT = r"predict: the outputs look like probabilities .* \(to predict by output_fn=torch.log\)"
OPTIONS = {"likelihood": "categorical", "num_samples": 4, "seed": 0}


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("plain", [True, False])  # a Sequential, or not
@pytest.mark.parametrize("as_loader", [True, False])
def test_probabilities_for_logits_are_warned_of_once(strategy, plain, as_loader):
    torch.manual_seed(0)
    net = Net(nn.Softmax(1))
    model, x = bnuq.to_bayesian(net.layers if plain else net, rho_init=-2.0), torch.randn(5, 4)
    given = [x, x] if as_loader else x
    with pytest.warns(UserWarning, match=TEXT) as caught:
        bnuq.predict(model, given, strategy=strategy, **OPTIONS)
    assert len(caught) == 1
    wrong = bnuq.predict(model, x, strategy=strategy, **OPTIONS)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    bnuq.predict(model, x, strategy=strategy, **OPTIONS)
    pred = bnuq.predict(
        model, x, output_fn=torch.log, keep_samples=True, strategy=strategy, **OPTIONS
    )
    torch.testing.assert_close(pred.mean, pred.samples.exp().mean(0))
    assert (wrong.entropy > pred.entropy).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own
def test_outputs_without_values_do_not_count_as_seen():
    model, x = bnuq.to_bayesian(Net(nn.Softmax(1))), torch.randn(5, 4)
    bnuq.predict(model, x[:0], **OPTIONS)
    torch.vmap(lambda x: bnuq.predict(model, x, **OPTIONS).mean)(x[None])
    with pytest.warns(UserWarning, match=TEXT):
        bnuq.predict(model, x, **OPTIONS)


def test_outputs_of_an_output_fn_do_not_count_as_the_models():
    model, x = bnuq.to_bayesian(Net(nn.Softmax(1))), torch.randn(5, 4)
    bnuq.predict(model, x, output_fn=torch.log, **OPTIONS)
    with pytest.warns(UserWarning, match=TEXT):
        bnuq.predict(model, x, **OPTIONS)


def test_a_warning_that_is_an_error_comes_again():
    model = bnuq.to_bayesian(Net(nn.Softmax(1)))
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(UserWarning, match=TEXT):
            warnings.simplefilter("error")
            bnuq.predict(model, torch.randn(5, 4), **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_samples_that_are_probabilities(dtype):
    probs = samples_of((4, 7, 30, 2)).softmax(2).to(dtype)
    text = r"^Prediction.from_samples: samples look like probabilities \(none is negative, over the"
    with pytest.warns(UserWarning, match=text):
        Prediction.from_samples(probs, "categorical")


def test_what_is_no_probabilities_is_not_warned_of():
    logits = samples_of((4, 7, 3))
    others = [logits, logits.log_softmax(2), logits.sigmoid(), torch.zeros(4, 7, 3)]
    others += [logits.softmax(2) * 1.01, logits[:, :0], logits.softmax(1), logits * torch.nan]
    one_row = logits.softmax(2)
    one_row[0, 3] = torch.tensor([1.5, -0.5, 0.0])
    for samples in [*others, one_row]:
        Prediction.from_samples(samples, "categorical")
    Prediction.from_samples(logits.softmax(2), "gaussian")
    assert Prediction.from_samples(logits.to("meta"), "categorical").mean.shape == (7, 3)
    model = bnuq.to_bayesian(Net(nn.Softmax(1)))
    bnuq.predict(model, torch.randn(5, 4), likelihood="gaussian", num_samples=4)
