"""The world of the study of facts, and that everybody in it reads the same."""

import pytest
from test_lessons import encode, school

from attractor.continual.lessons import check_forms, shared_subject
from studies.facts import WORDS, World, control_rows


@pytest.fixture(scope="module")
def world():
    return World(0, 20)


def test_a_world_is_drawn_from_its_seed(world):
    assert World(0, 20).chunks == world.chunks
    assert World(1, 20).chunks != world.chunks
    assert World(0, 3).chunks == world.chunks[:3]  # more chunks change no earlier one


def test_there_are_4000_facts_about_1000_different_things(world):
    names = [name for chunk in world.chunks for name, _, _ in chunk]
    assert len(names) == len(set(names)) == 1000
    assert sum(len(facts) for chunk in world.chunks for _, _, facts in chunk) == 4000


def test_the_subject_of_every_lesson_is_found(world):
    for number, chunk in enumerate(world.chunks):
        for lesson, (name, _, _) in zip(world.lessons(number), chunk, strict=True):
            assert shared_subject(check_forms(lesson)) == name


def test_what_is_asked_was_never_taught():
    for kind in ("person", "town", "company"):
        for relation, row in WORDS[kind].items():
            assert len(row["taught"]) == 3, relation
            assert not set(row["taught"]) & {*row["sentence"], *row["question"]}
            for form in (*row["taught"], *row["sentence"], *row["question"]):
                assert form.count("{n}") >= 1
                assert not form.endswith(" ")  # answers begin with their space


def test_controls_read_and_are_graded_on_what_lessons_are(world):
    _, lessons = school()
    taught = [check_forms(lesson) for lesson in world.lessons(0)[:3]]
    theirs = control_rows(encode, world.lessons(0)[:3], 3)
    for turn, rows in enumerate(theirs):
        ours = [
            row
            for number, forms in enumerate(taught)
            for row in lessons._rows(number, forms, shared_subject(forms), turn)
        ]
        assert [(row.tokens, row.graded) for row in ours] == rows
