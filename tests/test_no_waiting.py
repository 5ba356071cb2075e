"""A training step on a GPU waits for nothing and copies nothing to or from it, so that it queues
ahead and goes into a CUDA graph. Shown without a GPU,
by tensors that have a device and no values."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bnuq_ext import BayesLinear, ScaleMixturePrior, elbo_loss, ops
from bnuq_ext.inputs import move

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None,
        reason="a CPU-only torch makes no tensors of a GPU, those without values neither",
    ),
    # With one, the copy of a number to it is hidden from modes.
    pytest.mark.usefixtures("without_gpu"),
]


class Crossings(TorchDispatchMode):
    """The names of operators whose tensors lie on more than one device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
        if len({t.device.type for t in tensors}) > 1:
            self.found.append(str(func))
        return result


def test_what_crosses_is_found():
    with FakeTensorMode(), Crossings() as crossings:
        torch.tensor([3, 0], device="cuda")
        assert crossings.found
        with pytest.raises(RuntimeError):  # a value is asked for
            torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("prior", [None, ScaleMixturePrior(0.5, 1.0, 0.1)], ids=["normal", "mix"])
@pytest.mark.parametrize("T", [1, 3])
def test_loss_of_a_step(T, prior):
    options = {"device": "cuda"} | ({"prior": prior} if prior else {})
    with FakeTensorMode():
        model = nn.Sequential(
            BayesLinear(20, 8, **options), nn.ReLU(), BayesLinear(8, 3, **options)
        )
        x, y = torch.ones(5, 20, device="cuda"), torch.ones(5, dtype=torch.long, device="cuda")
        with Crossings() as crossings:
            loss = elbo_loss(model, x, y, batch_weight=0.1, num_samples=T).loss
            plain = model.train()(x)
    assert loss.device.type == plain.device.type == "cuda" and not crossings.found


def test_loss_of_a_step_that_learns_its_noise():
    with FakeTensorMode():
        model = nn.Sequential(BayesLinear(20, 3, device="cuda"))
        x, y = torch.ones(5, 20, device="cuda"), torch.ones(5, 3, device="cuda")
        std = torch.ones((), device="cuda", requires_grad=True)
        with Crossings() as crossings:
            options = dict(likelihood="gaussian", noise_std=std, batch_weight=0.1)
            loss = elbo_loss(model, x, y, **options).loss
    assert loss.device.type == "cuda" and not crossings.found


@pytest.mark.parametrize("seed", [3, -(2**63), 2**63 - 1, None])
def test_seed_of_an_op(seed):
    with FakeTensorMode(), Crossings() as crossings:
        made = ops.new_seed(seed, 2**62, "cuda")
    assert made.device.type == "cuda" and made.shape == (2,) and not crossings.found


class Copies(TorchDispatchMode):
    """(type of the new device, whether nothing waits for it) of every copy to another device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.found.append((kwargs["device"].type, bool(kwargs.get("non_blocking"))))
        return func(*args, **(kwargs or {}))


def test_what_is_copied_is_there_before_it_may_change():
    with FakeTensorMode(), Copies() as copies:
        for source, target in (("cuda", "cpu"), ("cpu", "cuda")):
            move((torch.empty(3, device=source),), torch.device(target))
    assert copies.found == [("cpu", False), ("cuda", False)]
