"""Bodies of `replicas` that end in another order than that in which they began."""

import asyncio
import contextvars
import threading

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


def test_a_body_ended_by_another_thread_is_over_here():
    model, other = make_model(), make_model()
    plain = model(X)
    outer, inner = replicas_of(other, 3, 2), replicas_of(model, 2, 0)
    next(outer)
    next(inner)
    closer = threading.Thread(target=inner.close)
    closer.start()
    closer.join()
    assert torch.equal(model(X), plain)
    close(other(X), expected(other, seed=2, num_samples=3))
    with bnuq.replicas(model, 5, 1):
        close(model(X), expected(model, seed=1, num_samples=5))
        close(other(X), expected(other, seed=2, num_samples=3))
    outer.close()
    assert torch.equal(other(X), other.eval()(X))


def test_a_body_that_the_event_loop_ends_is_over_in_its_task():
    model = make_model()
    plain = model(X)

    async def stream():
        with bnuq.replicas(model, 2, 0):
            while True:
                yield model(X)

    async def left_early():
        async for rows in stream():
            close(rows, expected(model, seed=0, num_samples=2))
            break
        await asyncio.sleep(0)  # in which the loop closes the generator, in a context of its own
        await asyncio.sleep(0)
        return model(X)

    assert torch.equal(asyncio.run(left_early()), plain)


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


def test_a_body_in_a_context_of_its_own_goes_on_when_the_one_around_it_ends():
    model, other = make_model(), make_model()
    plain, outer, inner = model(X), replicas_of(model, 2, 0), replicas_of(other, 3, 1)
    next(outer)
    apart = contextvars.copy_context()
    apart.run(next, inner)
    outer.close()
    assert torch.equal(apart.run(model, X), plain)
    close(apart.run(other, X), expected(other, seed=1, num_samples=3))
    apart.run(inner.close)


def test_the_divergence_of_a_part_is_over_the_weights_of_the_whole_models_forwards():
    layers = [bnuq.BayesLinear(4, 4, prior=bnuq.ScaleMixturePrior()) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    with bnuq.replicas(model, 7, 5):
        parts = [bnuq.kl_divergence(layer) for layer in layers]
        torch.testing.assert_close(sum(parts), bnuq.kl_divergence(model))
