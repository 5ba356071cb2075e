"""Activation checkpointing: what a backward computes again has the weights and statistics
of its forward."""

import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bnuq_ext as bnuq
from bnuq_ext.history import made_since, next_node


class Block(nn.Module):
    """A residual block, computed again in the backward if `again`."""

    def __init__(self, again: bool, reentrant: bool, middle: nn.Module, estimator="exact"):
        super().__init__()
        torch.manual_seed(0)
        options = dict(rho_init=-1.0, estimator=estimator)
        self.first = nn.Linear(5, 6)
        self.inner = nn.Sequential(
            bnuq.BayesLinear(6, 6, **options), middle, bnuq.BayesLinear(6, 6, **options), nn.Tanh()
        )
        self.last = bnuq.BayesLinear(6, 3, **options)
        self.again, self.reentrant = again, reentrant

    def forward(self, x):
        h = self.first(x).tanh()
        if self.again and torch.is_grad_enabled():
            return self.last(h + checkpoint(self.inner, h, use_reentrant=self.reentrant))
        return self.last(h + self.inner(h))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 5, generator=generator)
    return x, torch.randint(3, (7,), generator=generator)


def gradients(again, reentrant, loss, estimator="exact", middle=nn.Tanh):
    model = Block(again, reentrant, middle(), estimator)
    torch.manual_seed(2)
    loss(model).backward()
    return [p.grad for p in model.parameters()]


def elbo(model, num_samples, seed=3):
    options = dict(num_samples=num_samples, batch_weight=0.1, seed=seed)
    return bnuq.elbo_loss(model, *data(), **options).loss


def agree(gradients_of):
    """Whether parts are computed again changes no gradient."""
    kept, again = gradients_of(False), gradients_of(True)
    for a, b in zip(again, kept, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("estimator", ["exact", "local"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_elbo_has_the_same_gradient(reentrant, estimator, num_samples):
    def loss(model):
        return elbo(model, num_samples)

    agree(lambda again: gradients(again, reentrant, loss, estimator))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("middle", [nn.Tanh, lambda: nn.BatchNorm1d(6)])
def test_several_losses_before_one_backward(reentrant, middle):
    """Each forward is computed again with its own weights;
    behind batch norm there is one for each sample."""

    def loss(model):
        losses = [elbo(model, 2, seed=4), elbo(model, 3, seed=5)]
        if middle is nn.Tanh:
            with bnuq.replicas(model, 2, seed=6):
                losses.append(model(data()[0]).square().sum())
        return sum(losses)

    kept, again = (gradients(a, reentrant, loss, middle=middle) for a in (False, True))
    for a, b in zip(again, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_plain_call_draws_the_same_again(reentrant):
    """And is not taken for a part of an earlier forward, whose graph is still there."""
    x, _ = data()

    def loss(model):
        model.earlier = elbo(model, 2)
        model.earlier.backward(retain_graph=True)
        model.zero_grad()
        return model(x).square().sum()

    agree(lambda again: gradients(again, reentrant, loss))


class TwoHeads(Block):
    def forward(self, x):
        return self.first(x), super().forward(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_from_one_of_several_outputs(reentrant, inside):
    """In the body of `replicas` or after it."""

    def run(again):
        model = TwoHeads(again, reentrant, nn.Tanh())
        with bnuq.replicas(model, 3, seed=6):
            loss = model(data()[0])[1].square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad for p in model.parameters()]

    agree(run)


class Twice(nn.Module):
    def __init__(self, estimator):
        super().__init__()
        self.layer = bnuq.BayesLinear(5, 5, rho_init=-1.0, estimator=estimator)

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.layer(self.layer(x))
        return checkpoint(lambda h: self.layer(self.layer(h)), x, use_reentrant=False)


def test_a_layer_called_twice():
    """With one weight matrix it does not matter which call is made again;
    with fresh noise it does."""
    x = data()[0]
    for estimator in ("exact", "local"):
        model = Twice(estimator)
        with bnuq.replicas(model, 2, seed=0):
            y = model(x)
        if estimator == "exact":
            y.sum().backward()
            assert model.layer.weight_rho.grad.abs().sum() > 0
            continue
        with pytest.raises(
            ValueError, match="replicas: layer 'layer' must be called once .* got 2"
        ):
            y.sum().backward()


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_checkpoints(reentrant, num_samples):
    """A reentrant one runs a backward of its own inside the backward."""

    class Nested(Block):
        def forward(self, x):
            if not (self.again and torch.is_grad_enabled()):
                return self.last(self.inner(self.first(x)))
            options = dict(use_reentrant=self.reentrant)

            def outer(h):
                return self.inner[2:](checkpoint(self.inner[:2], h, **options))

            return self.last(checkpoint(outer, self.first(x), **options))

    def run(again):
        model = Nested(again, reentrant, nn.Tanh())
        elbo(model, num_samples).backward()
        return [p.grad for p in model.parameters()]

    agree(run)


class Auxiliary(Block):
    """Keeps an output for another loss, as deep supervision does; in a list if `all_kept`,
    from the first on."""

    all_kept = False

    def forward(self, x):
        h = self.first(x).tanh()
        y = self.last(h)  # made before what is computed again
        if self.again and torch.is_grad_enabled():
            kept = checkpoint(self.inner, h, use_reentrant=self.reentrant)
        else:
            kept = self.inner(h)
        self.kept = [*getattr(self, "kept", ()), kept] if self.all_kept else kept
        return y


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("way", ["one sample", "three samples", "replicas"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_module_keeps_is_computed_again_like_the_output(reentrant, way, alone):
    def run(again):
        model = Auxiliary(again, reentrant, nn.Tanh())
        if way == "replicas":
            with bnuq.replicas(model, 1, seed=6):
                loss = model(data()[0]).square().sum()
        else:
            loss = elbo(model, 1 if way == "one sample" else 3)
        kept = model.kept.square().sum()
        (kept if alone else loss + kept).backward()
        reached = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(reached) >= 6
        return reached

    agree(run)


def test_what_a_module_keeps_belongs_to_the_forward_that_made_it():
    def run(again):
        model = Auxiliary(again, False, nn.Tanh())
        model.all_kept = True
        model(data()[0])  # of no pass: computed again with the weights of torch's generator
        for seed in (4, 5):
            elbo(model, 1, seed)
        sum(kept.square().sum() for kept in model.kept[1:]).backward()
        return [p.grad for p in model.inner.parameters()]

    agree(run)


class OfOthers(nn.Module):
    """One layer on N rows and, computed again, on several others of each."""

    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        self.layer = bnuq.BayesLinear(5, 6, rho_init=-1.0)
        self.last = bnuq.BayesLinear(6, 3, rho_init=-1.0)
        self.again = again

    def forward(self, x, others):
        h, rows = self.layer(x), others.flatten(0, 1)
        if self.again and torch.is_grad_enabled():
            made = checkpoint(self.layer, rows, use_reentrant=False)
        else:
            made = self.layer(rows)
        return self.last((h * made.unflatten(0, (-1, others.shape[1])).sum(1)).tanh())


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4])
def test_a_layer_called_with_other_numbers_of_rows(num_samples):
    """The second call has twice the rows of the first."""
    x, y = data()
    inputs = x, torch.stack([x + 1, x.cos()], 1)

    def run(again):
        model = OfOthers(again)
        options = dict(num_samples=num_samples, batch_weight=0.1, seed=3)
        bnuq.elbo_loss(model, inputs, y, **options).loss.backward()
        return [p.grad for p in model.parameters()]

    agree(run)


class Pooled(nn.Module):
    """One layer on three tokens of each row, and on their means."""

    def __init__(self):
        super().__init__()
        self.layer = bnuq.BayesLinear(5, 5, rho_init=-1.0)

    def forward(self, x):
        means = self.layer(x.flatten(0, 1)).unflatten(0, (-1, 3)).mean(1)
        if not torch.is_grad_enabled():
            return self.layer(means)
        return checkpoint(self.layer, means, use_reentrant=False)


def test_rows_that_do_not_tell_whether_replicas_shared_them_are_refused():
    """The tokens are as many as three replicas have means."""
    model, x = Pooled(), torch.stack([data()[0]] * 3, 1) * torch.rand(7, 3, 1)
    with bnuq.replicas(model, 2, seed=0):
        model(x).sum().backward()
    assert model.layer.weight_rho.grad.abs().sum() > 0
    message = "replicas: layer 'layer' must be computed again with rows that tell .*, got 21"
    with bnuq.replicas(model, 3, seed=0):
        y = model(x)
    with pytest.raises(ValueError, match=message):
        y.sum().backward()


class Keeps(Block):
    """A block that keeps what it was given."""

    def forward(self, x):
        self.given = x
        return super().forward(x.tanh())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_an_input_that_a_module_keeps_belongs_to_the_forward_that_made_it(nested, reentrant):
    def run(again):
        first = Block(again, reentrant, nn.Tanh())
        second = nn.Sequential(nn.Linear(3, 5), Keeps(again, reentrant, nn.Tanh()))
        with bnuq.replicas(first, 1, seed=1):
            if nested:
                with bnuq.replicas(second, 1, seed=2):
                    y = second(first(data()[0]))
            else:
                h = first(data()[0])
        if not nested:
            with bnuq.replicas(second, 1, seed=2):
                y = second(h)
        y.square().sum().backward()
        return [p.grad for m in (first, second) for p in m.parameters()]

    agree(run)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("plain_first", [True, False])
def test_a_plain_call_and_a_loss_before_one_backward(plain_first, training):
    def run(again):
        model = Block(again, False, nn.Tanh()).train(training)
        torch.manual_seed(2)
        calls = [lambda m: m(data()[0]).square().sum(), lambda m: elbo(m, 1)]
        losses = [call(model) for call in (calls if plain_first else calls[::-1])]
        sum(losses).backward()
        return [p.grad for p in model.parameters()]

    agree(run)


class Spoils(Block):
    """Keeps views whose base is written afterwards, which torch lets nobody go back from."""

    def forward(self, x):
        h = self.first(x)
        self.halves = h.chunk(2, 1)
        with torch.no_grad():
            self.log = h[:, 0]
        return self.last(h.relu_())


def test_views_that_torch_does_not_let_be_read():
    model = Spoils(True, False, nn.Tanh())
    for num_samples in (1, 3):
        elbo(model, num_samples).backward()
    with bnuq.replicas(model, 1, seed=0):
        model(data()[0]).sum().backward()


def test_only_the_latest_of_many_items_are_looked_into():
    """A vocabulary is no output."""
    model = Block(False, False, nn.Tanh())
    model.vocabulary = {str(k): k for k in range(100_000)}
    model.kept = [data()[0]] * 100 + [model(data()[0])]
    start = next_node()
    assert made_since(start, model, []) == []
    model.kept.append(model(data()[0]))
    assert [t is model.kept[-1] for t in made_since(start, model, [])] == [True]


def test_a_kept_tensor_is_let_go_and_saved_in_silence():
    model = Auxiliary(False, False, nn.Tanh())
    with bnuq.replicas(model, 1, seed=0):
        model(data()[0])
        kept, model.kept = weakref.ref(model.kept), None
        assert kept() is None
        y = model(data()[0])
    torch.save(y, io.BytesIO())


class Regularised(nn.Module):
    """Adds the divergence of its weights, at those of the forward, to its output."""

    def __init__(self, again: bool, reentrant: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layer = bnuq.BayesLinear(5, 3, rho_init=-1.0, prior=bnuq.ScaleMixturePrior())
        self.again, self.reentrant = again, reentrant

    def both(self, x):
        return self.layer(x) + 0.01 * x.new_tensor([0.0, 1, 2]) * bnuq.kl_divergence(self.layer)

    def forward(self, x):
        x = x.clone().requires_grad_()
        if self.again:
            return checkpoint(self.both, x, use_reentrant=self.reentrant)
        return self.both(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_divergence_inside_is_at_the_same_weights_again(reentrant, num_samples):
    def found(again):
        elbo(model := Regularised(again, reentrant), num_samples).backward()
        return [p.grad for p in model.parameters()]

    agree(found)
