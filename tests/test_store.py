"""Store: every version is what the records say, before and after crashes, and damage is named."""

import random
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from disk import Disk
from hypothesis import HealthCheck, given, settings
from test_serve_state import OPERATIONS, Oracle, blank, few, lesson, record_for  # noqa: F401 (a fixture)

from attractor.serve import snapshots as snapshots_module
from attractor.serve.lineage import Lineage
from attractor.serve.store import Store, show, verify

FOLDER = Path("/store")


def opened(disk, **options):
    return Store.open(FOLDER, **{"identity": "base", "blank": blank, "files": disk} | options)


def snapshot_names(disk):
    return sorted(int(path.name) for path in disk.cache if path.parent == FOLDER / "snapshots")


def compare_all(store, oracle):
    assert store.last == oracle.last
    for version in range(store.oldest, store.last + 1):
        state = store.state_at(version)
        assert state.version == version
        oracle.compare(state)
    for version in (store.oldest - 1, store.last + 1):
        with pytest.raises(ValueError, match=f"has {store.oldest} to {store.last}"):
            store.state_at(version)


def commit(store, oracle, operation):
    """An operation of the oracle's, done by both."""
    record = record_for(oracle, operation, oracle.last + 1)
    if record[0] == "rollback" and record[1]["to"] < store.oldest:
        record[1]["to"] = store.oldest
    number = store.commit(*record)
    oracle.apply(*record)
    assert number == oracle.last


STEPS = OPERATIONS | OPERATIONS | st.sampled_from(["snapshot", "open again"])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=40), st.integers(1, 3))
def test_every_version_against_the_oracle(steps, keep):
    disk, oracle, made = Disk(), Oracle(), [0]
    store = opened(disk, keep_snapshots=keep)
    for step in steps:
        if step == "snapshot":
            is_new = store.last > made[-1]
            assert store.snapshot() == (store.last if is_new else None)
            made += [store.last] * is_new
            assert store.oldest <= made[-keep:][0]  # what was asked for is kept
        elif step == "open again":
            oldest = store.oldest
            store.close()
            store = opened(disk, keep_snapshots=keep)
            assert (store.oldest, store.recovered) == (oldest, None)
        else:
            commit(store, oracle, step)
    compare_all(store, oracle)
    store.close()
    report = verify(FOLDER, files=disk)
    assert not report.damage
    assert list(report.snapshots) == snapshot_names(disk)
    with opened(disk, keep_snapshots=keep) as store:
        compare_all(store, oracle)
    assert not disk.handles


def test_rollbacks_and_drops_that_meet():
    """Back before a drop, back before that, a source made anew; answers stay through all of it."""
    disk, oracle = Disk(), Oracle()
    with opened(disk, keep_snapshots=9) as store:
        for step in [
            ("lesson", 4, 1), ("lesson", 7, 0), "snapshot", ("drop", 2, 0), ("lesson", 4, 2),
            ("rollback", 1, 2), ("rollback", 1, 4), "snapshot", ("rollback", 1, 5), ("lesson", 5, 0),
            ("rollback", 2, 1), ("rollback", 2, 0), ("lesson", 4, 1), "snapshot", ("rollback", 5, 8),
        ]:  # fmt: skip
            if step == "snapshot":
                store.snapshot()
            else:
                commit(store, oracle, step)
        compare_all(store, oracle)
        assert store.state_at(5).sources.keys() == store.state_at(2).sources.keys() == {"folio"}


@settings(max_examples=300)
@given(st.lists(st.integers(0, 99), max_size=30), st.sets(st.integers(0, 30)), st.integers(1, 4))
def test_lineage(numbers, snapshots, keep):
    """Against following every version one step at a time."""
    before, rollbacks = {}, {}
    for version, number in enumerate(numbers, 1):
        before[version] = version - 1
        if number < 50:
            before[version] = rollbacks[version] = number % version
    last, roots = len(numbers), sorted({0, *(each for each in snapshots if each <= len(numbers))})

    def slowly(version, roots, first):
        path = []
        while version not in roots:
            if version < first:
                return None
            path += [version] * (version not in rollbacks)
            version = before[version]
        return version, path[::-1]

    def check(lineage, first):
        for version in range(first, last + 1):
            expected, found = slowly(version, lineage.roots, first), lineage.path(version)
            if found is not None:
                found = found[0], [each for a, b in found[1] for each in range(a + 1, b + 1)]
            assert found == expected
        lost = [
            version for version in range(first, last + 1) if slowly(version, lineage.roots, first) is None
        ]
        assert lineage.oldest == (lost[-1] + 1 if lost else first)

    lineage = Lineage(tuple(roots), rollbacks)
    check(lineage, 0)
    needed = lineage.needed(keep)
    kept = lineage.with_roots(needed)
    assert needed >= set(roots[-keep:])
    assert kept.oldest <= roots[-keep:][0]
    check(kept, min(needed))


# --- what a commit refuses


@pytest.mark.parametrize(
    ("kind", "fields", "tensors", "message"),
    [
        ("lesson", lesson(), {"rows/steps": torch.tensor([3]), "values/steps": torch.tensor([1])}, "3 of 3"),
        ("lesson", lesson(fields={"a": {1}}), {}, "not JSON"),
        ("drop", lesson(fields=..., source="nobody"), {}, "no source 'nobody'"),
        ("rollback", lesson(fields=..., source=..., to=4), {}, "to=4"),
        ("rollback", lesson(fields=..., source=..., to=0), {}, "version 0 is not there: .* has 1 to 3"),
    ],
)  # fmt: skip
def test_a_record_that_could_not_be_replayed_is_refused(kind, fields, tensors, message):
    disk = Disk()
    with opened(disk, keep_snapshots=1) as store:
        store.commit("lesson", lesson())
        store.snapshot()
        store.commit("lesson", lesson(source="folio"))
        store.commit("drop", lesson(fields=..., source="folio"))
    for _ in range(2):
        with opened(disk, keep_snapshots=1) as store, pytest.raises(ValueError, match=message):
            store.commit(kind, fields, tensors)
        assert store.last == 3


def test_rows_of_a_tensor_that_was_resized():
    """What may be written follows the shapes that drops, rollbacks and snapshots leave."""
    disk = Disk()
    grown = {"whole/bank": torch.ones(5, 2), "whole/steps": torch.ones(5, dtype=torch.int64)}
    fifth = {"rows/bank": torch.tensor([4]), "values/bank": torch.zeros(1, 2)}
    back = lesson(fields=..., source=...)
    for step, is_grown in [
        (("lesson", lesson()), False), (("lesson", lesson(), grown), True),
        (("rollback", back | {"to": 1}), False), (("rollback", back | {"to": 2}), True),
        (("drop", lesson(fields=...)), False), (("lesson", lesson()), False),
        (("rollback", back | {"to": 4}), True), (("lesson", lesson(), grown), True),
    ]:  # fmt: skip
        with opened(disk, keep_snapshots=9) as store:
            store.commit(*step)
        with opened(disk, keep_snapshots=9) as store:
            if is_grown:
                store.commit("lesson", lesson(), fifth)
                store.commit("rollback", back | {"to": store.last - 1})
            else:
                with pytest.raises(ValueError, match="4 to 4 of 3"):
                    store.commit("lesson", lesson(), fifth)
            if step[0] != "drop":
                store.snapshot()


# --- threads, sizes, and looking from outside


def test_commits_and_readers_while_snapshots_are_written(tmp_path):
    """On a real disk. A snapshot that waits in the middle holds up neither of them."""
    oracle = Oracle()
    store = Store.open(tmp_path, identity="base", blank=blank, keep_snapshots=2)
    errors, done = [], threading.Event()

    def attempt(work):
        try:
            while not done.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    def read():
        version = store.oldest
        try:
            assert store.state_at(version).version == version
        except ValueError as error:
            assert "is not there" in str(error)  # it left in between  # noqa: PT017

    threads = [threading.Thread(target=attempt, args=[work]) for work in (store.snapshot, read)]
    for thread in threads:
        thread.start()
    chance = random.Random(0)
    kinds = ["lesson"] * 9 + ["drop", "rollback"]
    for _ in range(150):
        operation = chance.choice(kinds), chance.randrange(99), chance.randrange(99)
        record = record_for(oracle, operation, oracle.last + 1)
        if record[0] == "rollback":
            record[1]["to"] = max(record[1]["to"], oracle.last - 1)
            if record[1]["to"] < store.oldest:
                continue
        try:
            store.commit(*record)
        except ValueError as error:
            assert "is not there" in str(error)  # noqa: PT017
        else:
            oracle.apply(*record)
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    compare_all(store, oracle)
    store.close()
    with Store.open(tmp_path, identity="base", blank=blank) as store:
        compare_all(store, oracle)
        assert store.oldest > 1


def test_a_snapshot_in_the_middle_holds_up_nothing(tmp_path, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    parts = snapshots_module.parts

    def slowly(state, own):
        for part in parts(state, own):
            reached.set()
            assert go_on.wait(300)
            yield part

    monkeypatch.setattr(snapshots_module, "parts", slowly)
    oracle = Oracle()
    with Store.open(tmp_path, identity="base", blank=blank) as store:
        commit(store, oracle, ("lesson", 4, 1))
        thread = threading.Thread(target=store.snapshot)
        thread.start()
        assert reached.wait(300)
        for operation in [("lesson", 4, 0), ("rollback", 1, 1), ("lesson", 7, 0)]:
            commit(store, oracle, operation)
            oracle.compare(store.state_at())
        go_on.set()
        thread.join()
        compare_all(store, oracle)
        assert store._lineage.roots == (0, 1)


def test_large_tensors_go_in_pieces(monkeypatch):
    monkeypatch.setattr(snapshots_module, "PIECE", 4000)
    monkeypatch.setattr(snapshots_module, "SYNC_EVERY", 10_000)
    monkeypatch.setattr(snapshots_module, "LINES", 2)
    large = {"bank": torch.zeros(300, 50), "steps": torch.zeros(300, dtype=torch.int64)}
    disk, oracle_rows = Disk(), torch.randn(300, 50)
    with opened(disk, blank=lambda: large) as store:
        for number in range(5):
            fields = lesson(key=str(number), fields={"n": number})
            store.commit(
                "lesson", fields, {"rows/bank": torch.arange(200), "values/bank": oracle_rows[:200] + number}
            )
        store.commit("lesson", lesson(source="grown"), {"whole/bank": oracle_rows.repeat(2, 1)})
        expected = store.state_at()
        store.snapshot()
    path = FOLDER / "snapshots" / f"{6:020d}"
    sizes = [len(entry.tensors) for entry in snapshots_module.entries(disk, FOLDER, 6) if entry.tensors]
    assert max(sizes) < 4400
    assert len(sizes) > 40
    assert len(disk.cache[path].cache) < 220_000  # 200 of 300 rows and 600, nothing of what is blank
    with opened(disk, blank=lambda: large) as store:
        found = store.state_at()
    assert found.answers == expected.answers
    assert found.history == expected.history
    for source, own in expected.sources.items():
        assert found.sources[source].fields == own.fields
        assert all(torch.equal(found.sources[source].tensors[name], own.tensors[name]) for name in large)
    assert not any(value.any() for value in large.values())


def test_answers_that_are_long_go_in_pieces(monkeypatch):
    """256 answers that name every patch of a large model would not fit into a record."""
    monkeypatch.setattr("attractor.serve.segments.MOST_JSON", 10_000)
    monkeypatch.setattr(snapshots_module, "PIECE", 8000)
    disk = Disk()
    with opened(disk) as store:
        for number in range(4):
            store.commit("lesson", lesson(key=str(number), answer={"patches": {"0": list(range(1000))}}))
        expected = store.state_at()
        assert store.snapshot() == 4
    with opened(disk) as store:
        assert store.state_at().answers == expected.answers


def test_show(tmp_path):
    with Store.open(tmp_path, identity="base", blank=blank) as store:
        tensors = {"rows/bank": torch.tensor([1]), "values/bank": torch.ones(1, 2)}
        store.commit("lesson", lesson(fields={"tokens": 3}, answer={"loss": 1.5}), tensors)
        store.commit("rollback", lesson(fields=..., source=..., to=0, key=None))
        assert store.snapshot() == 2
        assert store.snapshot() is None
    first, second = show(tmp_path)
    assert first.pop("bytes") > 200
    assert first == {
        "version": 1, "kind": "lesson", "source": "kjv", "key": "a", "answer": {"loss": 1.5},
        "fields": ["tokens"], "at": "2026-01-01T00:00:00Z",
        "tensors": {"rows/bank": ["I64", 1], "values/bank": ["F32", 1, 2]},
    }  # fmt: skip
    assert (second["version"], second["kind"], second["to"]) == (2, "rollback", 0)
    report = verify(tmp_path)
    assert (report.journal.last, report.snapshots, report.damage) == (2, {2: None}, [])
    with pytest.raises(ValueError, match="keep_snapshots=0"):
        Store.open(tmp_path, identity="base", blank=blank, keep_snapshots=0)
