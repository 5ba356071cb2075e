"""Bodies of `replicas` that end in another order than that in which they began."""

import torch
from test_replicas import X, close, expected, make_model

import bnuq_ext as bnuq


def replicas_of(model, num_samples, seed):
    """A generator that stays in its body until it is closed."""
    with bnuq.replicas(model, num_samples, seed):
        while True:
            yield model(X)


def test_a_body_ends_before_a_later_one_for_the_model():
    model = make_model()
    plain = model(X)
    first = replicas_of(model, 3, 3)
    close(next(first), expected(model, seed=3, num_samples=3))
    with bnuq.replicas(model, 5, 1):
        first.close()
        close(model(X), expected(model, seed=1, num_samples=5))
    assert torch.equal(model(X), plain)
    assert torch.equal(expected(model), expected(make_model()))


def test_a_body_ends_before_later_ones_for_other_models():
    first, second, third = (make_model() for _ in range(3))
    plain = first(X)
    bodies = [replicas_of(m, 2, seed) for seed, m in enumerate((first, second, third))]
    for body in bodies:
        next(body)
    bodies[1].close()
    assert torch.equal(second(X), plain)
    close(first(X), expected(first, seed=0, num_samples=2))
    close(third(X), expected(third, seed=2, num_samples=2))
    bodies[0].close()
    assert torch.equal(first(X), plain)
    close(third(X), expected(third, seed=2, num_samples=2))
    bodies[2].close()
    assert torch.equal(third(X), plain)
    with bnuq.replicas(second, 2, 1):
        close(second(X), expected(second, seed=1, num_samples=2))


def test_a_divergence_belongs_to_the_body_that_is_left():
    layers = [bnuq.BayesLinear(4, 3, prior=bnuq.ScaleMixturePrior()) for _ in range(2)]
    alone = bnuq.kl_divergence(layers[0], num_samples=7, seed=5)

    def body():
        with bnuq.replicas(layers[1], 2, 0):
            yield

    outer = body()
    next(outer)
    with bnuq.replicas(layers[0], 7, 5):
        outer.close()
        assert bnuq.kl_divergence(layers[0]) == alone
        assert bnuq.kl_divergence(layers[1], 4, 1) != bnuq.kl_divergence(layers[1], 4, 2)
