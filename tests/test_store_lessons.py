"""Lessons that own their patches, in a store: each is one record; several go in together or not at all."""

import json
import sqlite3

import pytest
import torch
from stores import AT, opened

from attractor.continual.delta import Delta
from attractor.serve.store import Change, Store, verify


def lesson(number, source="wiki", value=1.0, **columns):
    delta = Delta({"x": (torch.tensor([number]), torch.full((1, 2), value))}, {"about": torch.tensor([7])})
    return Change(
        kind="lesson", answer={}, source=source, target=number, fields={"n": number}, delta=delta, **columns
    )


def change(kind, **columns):
    return Change(kind=kind, answer={}, **columns)


def values(store, version=None):
    """The number that each lesson was made with."""
    state = store.state_at(version)
    assert not state.sources
    return {number: own.delta.rows["x"][1][0, 0].item() for number, own in state.lessons.items()}


def test_a_lesson_replaces_itself_and_is_dropped_by_its_number_or_by_its_source(tmp_path):
    with opened(tmp_path) as store:
        store.commit_all([lesson(0), lesson(1, "news"), lesson(2)], at=AT)
        assert values(store) == {0: 1, 1: 1, 2: 1}
        store.commit_all([lesson(0, value=5.0), change("drop", source="wiki", target=2)], at=AT)
        assert values(store) == {0: 5, 1: 1}
        assert store.state_at().lessons[0].version == 4
        store.commit_all([change("drop", source="news")], at=AT)
        assert values(store) == {0: 5}
        store.commit("rollback", {}, at=AT, target=3)
        assert values(store) == {0: 1, 1: 1, 2: 1}
        assert (store.last, store.next_lesson) == (7, 3)
        store.snapshot()
    with opened(tmp_path) as store:
        assert [values(store, version) for version in range(8)] == [
            {},
            {0: 1},
            {0: 1, 1: 1},
            {0: 1, 1: 1, 2: 1},
            {0: 5, 1: 1, 2: 1},
            {0: 5, 1: 1},
            {0: 5},
            {0: 1, 1: 1, 2: 1},
        ]
        assert store.state_at().lessons[1].source == "news"
    assert not verify(tmp_path).damage


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_erasing_one_lesson_leaves_the_others(tmp_path, with_snapshot):
    with opened(tmp_path, keep_snapshots=1) as store:
        store.commit_all([lesson(0, value=0.125), lesson(1, value=0.25)], at=AT)
        if with_snapshot:
            store.snapshot()
        again = lesson(1, value=0.5)
        erasing = [change("erase", source="wiki", target=n) for n in (0, 1)]
        store.commit_all([*erasing, again], at=AT)
        for version in range(store.oldest, 6):
            assert values(store, version) in ({}, {1: 0.5})
        assert (store.source_of(0), store.source_of(1), store.source_of(9)) == (None, "wiki", None)
        store.commit("rollback", {}, at=AT, target=2)
        assert values(store) == {}
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    for value in (0.125, 0.25):
        assert torch.full((1, 2), value).numpy().tobytes() not in data
    report = verify(tmp_path)
    assert (report.damage, report.erased) == ([], ["lesson 0", "lesson 1"])


def test_changes_go_in_together_or_not_at_all(tmp_path):
    with opened(tmp_path) as store:
        store.commit_all([lesson(0, key="k", content="c", sender="ann")], at=AT)
        for wrong, message in (
            (lesson(2, key="k", content="c"), "came with record 1"),
            (change("rollback", target=9), "version 9 is not there"),
            (change("calibration", source="wiki"), "source='wiki'"),
            (change("calibration"), "fields and a delta"),
            (change("forget", source="wiki"), "kind 'forget'"),
        ):
            with pytest.raises(ValueError, match=message):
                store.commit_all([lesson(1), wrong], at=AT)
            assert (store.last, values(store)) == (1, {0: 1})
    with opened(tmp_path) as store:
        assert store.last == 1


def test_the_calibration_stays_whatever_is_let_go_of(tmp_path):
    measured = Delta(whole={"whitening": torch.eye(2)})
    with opened(tmp_path, keep_snapshots=1) as store:
        assert store.calibration() is None
        store.commit("calibration", {}, at=AT, fields={"unit": 2.0}, delta=measured)
        store.commit_all([lesson(0)], at=AT)
        store.snapshot()
        store.commit_all([lesson(1)], at=AT)
        store.snapshot()
        fields, delta = store.calibration()
        assert fields == {"unit": 2.0}
        assert torch.equal(delta.whole["whitening"], torch.eye(2))
        assert values(store) == {0: 1, 1: 1}
    assert not verify(tmp_path).damage


def test_any_tool_can_ask_who_taught_what(tmp_path):
    with opened(tmp_path) as store:
        store.commit_all([lesson(0, sender="ann"), lesson(1, "news", sender="bob")], at=AT)
        assert [line["lesson"] for line in store.history(5)] == [1, 0]
    connection = sqlite3.connect(f"file:{tmp_path}/lessons.db?mode=ro", uri=True)
    rows = connection.execute("SELECT target, source, sender, fields FROM records").fetchall()
    connection.close()
    assert [(*row[:3], json.loads(row[3])) for row in rows] == [
        (0, "wiki", "ann", {"n": 0}),
        (1, "news", "bob", {"n": 1}),
    ]
    assert isinstance(store, Store)
