"""Basins of new lessons hold their own contexts, and take nothing from background or earlier lessons."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.continual.config import LessonConfig
from attractor.continual.placing import Taken, place, silent, spread_out
from attractor.ops import unit

WIDTH = 24


def contexts(generator, centre, count, spread):
    return unit(centre + spread * torch.randn(count, WIDTH, generator=generator) / WIDTH**0.5)


def no_background(keys):
    return torch.full((len(keys),), -1.0)


def nothing_taken():
    empty, none = torch.empty(0, WIDTH), torch.empty(0)
    return Taken(empty, none, none.long(), none.bool(), empty, none, none.long())


def depth(keys, prototypes, radius):
    return (keys @ prototypes.T - radius).amax(1)


def taken_from(placed, keys, numbers):
    """What was placed, as what later lessons find."""
    depths = [placed.depth(own, lesson) for lesson, own in enumerate(keys)]
    return Taken(
        placed.prototypes,
        placed.radius,
        torch.tensor([numbers[lesson] for lesson in placed.lesson]),
        torch.ones(len(placed.lesson), dtype=torch.bool),
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
    assert spread_out(keys[:0], 4, 0.9) == []


def of_one_name(draw, people, count):
    """Contexts of people who share a name: their directions have most in common."""
    shared, ways = unit(torch.randn(1, 192, generator=draw)), unit(torch.randn(count, 192, generator=draw))
    persons = unit(torch.randn(people, 192, generator=draw))
    return [unit(shared + 0.5 * person + 0.4 * ways) for person in persons]


def nothing_taken_of(width):
    empty, none = torch.empty(0, width), torch.empty(0)
    return Taken(empty, none, none.long(), none.bool(), empty, none, none.long())


@pytest.mark.parametrize("seed", range(5))
def test_what_resembles_a_subject_falls_to_silent_basins_and_the_subject_does_not(seed):
    """People who share a last name: those who were read as strangers, and others whom nobody has seen."""
    own, *others = of_one_name(torch.Generator().manual_seed(seed), 25, 12)
    known, unknown = torch.cat(others[:12]), torch.cat(others[12:])
    config = LessonConfig()
    placed = place([own], nothing_taken_of(192), no_background, [None], config)
    beside = silent(placed, [own], [known], nothing_taken_of(192), config)

    def taken_for_it(keys):
        acts = depth(keys, placed.prototypes, placed.radius)
        return float(((acts > 0) & (acts > depth(keys, beside.prototypes, beside.radius))).float().mean())

    assert (placed.depth(unknown, 0) > 0).float().mean() > 0.9  # without the silent ones
    assert taken_for_it(own) == 1
    assert max(taken_for_it(known), taken_for_it(unknown)) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_silent_basins_leave_other_lessons_their_contexts(seed):
    """Of lessons of the same batch, and of earlier ones."""
    old, first, second, *others = of_one_name(torch.Generator().manual_seed(seed), 20, 8)
    strangers, config = torch.cat(others), LessonConfig()
    nothing = nothing_taken_of(192)
    before = place([old], nothing, no_background, [None], config)
    taken = taken_from(before, [old], [7])
    placed = place([first, second], taken, no_background, [None] * 2, config)
    beside = silent(placed, [first, second], [strangers] * 2, taken, config)
    lessons = [(old, before, 0), (first, placed, 0), (second, placed, 1)]
    for keys, basins, lesson in lessons:
        assert (depth(keys, beside.prototypes, beside.radius) < basins.depth(keys, lesson)).all()


def test_without_strangers_nothing_is_silent():
    own, *_ = of_one_name(torch.Generator().manual_seed(0), 1, 8)
    placed = place([own], nothing_taken_of(192), no_background, [None], LessonConfig())
    assert silent(placed, [own], [own[:0]], nothing_taken_of(192), LessonConfig()).lesson == []


def test_silent_basins_need_no_protection_and_are_not_inherited():
    """A later lesson may lie in them, and one that takes the place of theirs has none of them."""
    own, other, *strangers = of_one_name(torch.Generator().manual_seed(1), 12, 8)
    config, nothing = LessonConfig(), nothing_taken_of(192)
    placed = place([own], nothing, no_background, [None], config)
    beside = silent(placed, [own], [torch.cat(strangers)], nothing, config)
    assert beside.lesson
    alone = taken_from(placed, [own], [3])
    both = Taken(
        torch.cat([alone.prototypes, beside.prototypes]),
        torch.cat([alone.radius, beside.radius]),
        torch.full((len(alone.owner) + len(beside.lesson),), 3),
        torch.cat([alone.acts, torch.zeros(len(beside.lesson), dtype=torch.bool)]),
        alone.keys,
        alone.depth,
        alone.key_owner,
    )
    assert all(torch.equal(a, b) for a, b in zip(alone.points(), both.points(), strict=True))
    heirs = [place([own], taken, no_background, [3], config) for taken in (alone, both)]
    assert heirs[0].lesson == heirs[1].lesson
    assert (place([other], both, no_background, [None], config).depth(other, 0) > 0).all()
