"""The loop counts steps and their time, and nothing else; a step goes down the sum of its objectives."""

import math

import pytest
import torch

from attractor import loop as loops
from attractor.loop import Loop, annealed, descend


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is told."""
    now = [0.0]
    monkeypatch.setattr(loops.time, "perf_counter", lambda: now[0])
    return now


def test_steps_and_their_seconds(clock):
    def take(number):
        clock[0] += 1
        return 10.0 * number

    loop, seen = Loop(take), []
    for done in loop.steps(3):
        clock[0] += 100  # evaluation, say
        seen.append((done, loop.loss))
    with loop.timed():
        clock[0] += 0.5
    assert seen[1:] == [(1, 0.0), (2, 10.0), (3, 20.0)]
    assert math.isnan(seen[0][1])
    assert (loop.step, loop.seconds) == (3, 3.5)
    assert list(loop.steps(5)) == [3, 4, 5]  # it goes on from where it is


def test_it_is_left_early_and_a_step_that_raises_does_not_count(clock):
    def take(number):
        clock[0] += 1
        if number == 2:
            raise ValueError("no")

    loop = Loop(take)
    for done in loop.steps(10):
        if done == 1:
            break
    assert loop.step == 1
    with pytest.raises(ValueError, match="no"):
        list(loop.steps(10))
    assert (loop.step, loop.seconds) == (2, 3)


def test_a_step_is_that_of_the_sum_of_the_objectives():
    start = torch.tensor([3.0, 4.0])
    moved = []
    for pieces in ((1.0,), (0.25, 0.75)):
        weight = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([weight])
        alive = []

        def objectives(weight=weight, pieces=pieces, alive=alive):
            for piece in pieces:
                yield piece * weight.square().sum() / 2
                alive.append(weight.grad.clone())  # the one before has been gone down by now

        descend(optimizer, objectives(), 0.5, clip=[weight], clip_norm=1.0)
        assert len(alive) == len(pieces)
        moved.append(weight.detach() - start)
    torch.testing.assert_close(moved[0], -0.5 * start / 5, rtol=1e-5, atol=0)  # the gradient's norm was 5
    torch.testing.assert_close(*moved)
    descend(optimizer, [weight.sum()], 1.0)  # not clipped, and nothing is left of the gradient before
    torch.testing.assert_close(weight.detach(), start + moved[1] - 1)


def test_a_rate_rises_and_falls():
    shares = [annealed(step, 12, 3) for step in range(13)]
    assert shares[0] == pytest.approx(1 / 3)
    assert max(shares) == shares[2]
    assert shares[-1] == pytest.approx(0)
    assert annealed(0, 12) == 1
