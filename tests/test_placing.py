"""Basins of new lessons hold their own contexts, and take nothing from background or earlier lessons."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.continual.config import LessonConfig
from attractor.continual.placing import Taken, place, spread_out
from attractor.ops import unit

WIDTH = 24


def contexts(generator, centre, count, spread):
    return unit(centre + spread * torch.randn(count, WIDTH, generator=generator) / WIDTH**0.5)


def no_background(keys):
    return torch.full((len(keys),), -1.0)


def nothing_taken():
    empty, none = torch.empty(0, WIDTH), torch.empty(0)
    return Taken(empty, none, none.long(), empty, none, none.long())


def depth(keys, prototypes, radius):
    return (keys @ prototypes.T - radius).amax(1)


def taken_from(placed, keys, numbers):
    """What was placed, as what later lessons find."""
    depths = [placed.depth(own, lesson) for lesson, own in enumerate(keys)]
    return Taken(
        placed.prototypes,
        placed.radius,
        torch.tensor([numbers[lesson] for lesson in placed.lesson]),
        torch.cat(list(keys)),
        torch.cat(depths),
        torch.tensor([numbers[lesson] for lesson, own in enumerate(keys) for _ in own]),
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), alike=st.floats(0.2, 2.0), spread=st.floats(0.05, 0.6))
def test_every_context_falls_to_its_own_lesson_if_there_may_be_as_many_patches(seed, alike, spread):
    """However alike two subjects are, a context that was read belongs to the lesson it was read in."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(WIDTH, generator=draw)
    centres = [unit(shared + alike * torch.randn(WIDTH, generator=draw)) for _ in range(3)]
    keys = [contexts(draw, centre, 10, spread) for centre in centres]
    config = LessonConfig(prototypes=2, most=10, cover=1.0, radius=0.3, room=0.001)
    placed = place(keys, nothing_taken(), no_background, [None] * 3, config)
    for lesson, own in enumerate(keys):
        mine = placed.depth(own, lesson)
        assert (mine > 0).all()
        for other in range(3):
            if other != lesson:
                assert (mine > placed.depth(own, other)).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), alike=st.floats(0.1, 1.0))
def test_later_lessons_do_not_take_the_contexts_of_earlier_ones(seed, alike):
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(WIDTH, generator=draw)
    old, new = (
        [contexts(draw, unit(shared + alike * torch.randn(WIDTH, generator=draw)), 8, 0.3)] for _ in range(2)
    )
    config = LessonConfig(prototypes=3, most=8, radius=0.4, room=0.01)
    before = place(old, nothing_taken(), no_background, [None], config)
    after = place(new, taken_from(before, old, [7]), no_background, [None], config)
    kept = before.depth(old[0], 0)
    inside = kept > 0
    allowed = after.radius < 1 - config.room  # a radius cannot grow beyond this
    taken = depth(old[0], after.prototypes[allowed], after.radius[allowed]) if allowed.any() else kept - 1
    assert (taken[inside] < kept[inside]).all()


def test_a_lesson_that_takes_the_place_of_another_lies_deeper_everywhere():
    draw = torch.Generator().manual_seed(0)
    centre = torch.randn(WIDTH, generator=draw)
    keys = [contexts(draw, unit(centre), 8, 0.3)]
    config = LessonConfig(prototypes=3, radius=0.5)
    old = place(keys, nothing_taken(), no_background, [None], config)
    new = place(keys, taken_from(old, keys, [4]), no_background, [4], config)
    anywhere = unit(torch.randn(500, WIDTH, generator=draw))
    for x in (keys[0], anywhere):
        assert (new.depth(x, 0) > old.depth(x, 0)).all()


def test_radii_stay_away_from_background():
    draw = torch.Generator().manual_seed(1)
    keys = [contexts(draw, torch.randn(WIDTH, generator=draw), 6, 0.5)]
    background = contexts(draw, keys[0].mean(0), 50, 1.5)

    def nearest(prototypes):
        return (prototypes @ background.T).amax(1)

    config = LessonConfig(radius=0.1, room=0.05)
    placed = place(keys, nothing_taken(), nearest, [None], config)
    assert (depth(background, placed.prototypes, placed.radius) < 0).all()


@pytest.mark.parametrize("most", [1, 2, 5])
def test_there_are_never_more_patches_than_allowed(most):
    draw = torch.Generator().manual_seed(2)
    keys = [contexts(draw, torch.randn(WIDTH, generator=draw), 12, 2.0) for _ in range(2)]
    placed = place(keys, nothing_taken(), no_background, [None, None], LessonConfig(prototypes=1, most=most))
    assert all(1 <= placed.lesson.count(lesson) <= most for lesson in (0, 1))


def test_prototypes_are_spread_out():
    keys = unit(torch.tensor([[1.0, 0, 0], [0.999, 0.01, 0], [0, 1, 0], [0, 0, 1]]))
    assert len(spread_out(keys, 1, 0.9)) == 1
    assert len(spread_out(keys, 4, 0.9)) == 3  # the first two are one
    assert len(spread_out(keys[:2], 4, 0.9)) == 1
