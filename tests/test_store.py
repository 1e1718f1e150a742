"""Store: every version is what the records say, whatever is forgotten, dropped, lost or read beside it."""

import hashlib
import itertools
import json
import random
import sqlite3
import threading
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load
from stores import AT, Oracle, commit, lesson, opened

from attractor.continual.delta import Delta
from attractor.serve.errors import KeyReused
from attractor.serve.store import Store, backup, show, states, tools, verify
from attractor.serve.store.states import path_to

KINDS = ["lesson"] * 5 + ["drop", "erase", "rollback", "rollback"]
OPERATIONS = st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 99))
STEPS = OPERATIONS | OPERATIONS | st.sampled_from(["snapshot", "open again", "lose snapshots"])


def compare_all(store, oracle):
    assert store.last == oracle.last
    for version in range(store.oldest, store.last + 1):
        state = store.state_at(version)
        assert state.version == version
        oracle.compare(state)
    for version in (store.oldest - 1, store.last + 1):
        with pytest.raises(ValueError, match=f"has {store.oldest} to {store.last}"):
            store.state_at(version)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=30), st.integers(1, 3))
def test_every_version_against_the_oracle(tmp_path_factory, steps, keep):
    folder, oracle = tmp_path_factory.mktemp("store"), Oracle()
    store = opened(folder, keep_snapshots=keep, sync="off")
    for step in steps:
        if step == "snapshot":
            store.snapshot()
            assert store.snapshot() is None
        elif step in ("open again", "lose snapshots"):
            oldest = store.oldest
            store.close()
            if step == "lose snapshots":
                (folder / "snapshots.db").unlink()
            store = opened(folder, keep_snapshots=keep, sync="off")
            assert (store.oldest, store.recovered) == (oldest, None)
        else:
            commit(store, oracle, *step)
    compare_all(store, oracle)
    assert [line["version"] for line in store.history(99)] == list(range(store.last, 0, -1))
    store.close()
    report = verify(folder)
    assert (report.damage, report.last, report.oldest) == ([], oracle.last, store.oldest)
    with opened(folder, keep_snapshots=keep) as store:
        compare_all(store, oracle)


def test_old_versions_are_let_go_and_rollbacks_to_them_stay(tmp_path):
    oracle = Oracle()
    with opened(tmp_path, keep_snapshots=2) as store:
        for number in range(20):
            commit(store, oracle, *(("rollback", 1, 3) if number == 9 else ("lesson", 4, 1 + number)))
            if number % 4 == 3:
                store.snapshot()
        assert store.oldest == 16
        commit(store, oracle, "rollback", 1, 17)
        compare_all(store, oracle)
    with opened(tmp_path, keep_snapshots=2) as store:
        compare_all(store, oracle)
        for number in range(4):
            commit(store, oracle, "lesson", 4, 1 + number)
            store.snapshot()
        assert store.oldest == 24
        compare_all(store, oracle)
    with sqlite3.connect(tmp_path / "lessons.db") as database:
        query = "SELECT count(*), count(delta), min(CASE WHEN delta NOT NULL THEN number END) FROM records"
        assert database.execute(query).fetchone() == (25, 1, 25)
        assert database.execute("SELECT version FROM states").fetchall() == [(24,)]
    database.close()


def test_a_rollback_to_before_the_oldest_version_keeps_a_state_of_its_own(tmp_path):
    oracle = Oracle()
    with opened(tmp_path, keep_snapshots=3) as store:
        steps = [("lesson", 4, 1), ("lesson", 7, 2), "snapshot", ("lesson", 4, 5), "snapshot"]
        steps += [("rollback", 2, 1), ("lesson", 4, 9), "snapshot", ("lesson", 1, 1), "snapshot"]
        for step in steps:
            if step == "snapshot":
                store.snapshot()
            else:
                commit(store, oracle, *step)
        assert (store.oldest, store._roots) == (3, [3, 4])
        compare_all(store, oracle)
    (tmp_path / "snapshots.db").unlink()
    with opened(tmp_path) as store:
        compare_all(store, oracle)
    assert not verify(tmp_path).damage


@settings(max_examples=200)
@given(st.lists(st.integers(0, 99), max_size=30), st.sets(st.integers(0, 30)))
def test_the_path_to_a_version(numbers, snapshots):
    """Against following every version one step at a time."""
    before, rollbacks = {}, {}
    for version, number in enumerate(numbers, 1):
        before[version] = version - 1
        if number < 50:
            before[version] = rollbacks[version] = number % version
    roots = sorted({0, *(each for each in snapshots if each <= len(numbers))})
    for version in range(len(numbers) + 1):
        root, spans = path_to(version, roots, rollbacks)
        steps, place = [], version
        while place not in roots:
            steps += [place] * (place not in rollbacks)
            place = before[place]
        assert root == place
        assert [each for after, upto in spans for each in range(after + 1, upto + 1)] == steps[::-1]


# --- erasing


def test_what_is_erased_is_gone_from_every_file_and_stays_gone(tmp_path):
    secret = torch.arange(2000, dtype=torch.float64).sin()
    needle = secret[700:900].numpy().tobytes()
    folder = tmp_path / "data"

    def files_with_it():
        return sorted(path.name for path in folder.iterdir() if needle in path.read_bytes())

    with opened(folder, keep_snapshots=1) as store:
        for number in range(3):
            store.commit("lesson", **lesson(source="mallory", delta=Delta({}, {"x": secret + number})))
            store.commit("lesson", **lesson(source="kjv"))
            if number != 1:
                store.snapshot()
        store.commit("drop", **lesson(source="mallory", fields=..., delta=...))
        assert files_with_it()
        assert store.holds("mallory")
        store.commit("erase", **lesson(source="mallory", fields=..., delta=...))
        assert files_with_it() == []
        assert not store.holds("mallory")
        for version in range(store.oldest, store.last + 1):
            assert store.state_at(version).sources.keys() == {"kjv"}
        store.commit("rollback", **lesson(source=..., fields=..., delta=..., target=store.oldest))
        assert store.state_at().sources.keys() == {"kjv"}
        store.commit("lesson", **lesson(source="mallory"))  # anew, and that is kept
        assert store.state_at().sources.keys() == {"kjv", "mallory"}
        store.snapshot()
    assert files_with_it() == []
    report = verify(folder)
    assert (report.damage, report.erased) == ([], ["mallory"])
    with opened(folder) as store:
        assert store.state_at().sources["mallory"].delta.whole["x"].tolist() == [1, 1]


def test_forgetting_can_be_taken_back(tmp_path):
    with opened(tmp_path) as store:
        store.commit("lesson", **lesson())
        store.commit("drop", **lesson(fields=..., delta=...))
        assert not store.state_at().sources
        store.commit("rollback", **lesson(source=..., fields=..., delta=..., target=1))
        assert store.state_at().sources.keys() == {"kjv"}


# --- keys


def test_a_key_is_bound_to_its_content_and_to_who_sent_it(tmp_path):
    asked = {"key": "k1", "sender": "ann", "content": "abc"}
    with opened(tmp_path, keep_snapshots=1) as store:
        assert store.answer_to("k1", "ann", "abc") is None
        store.commit("lesson", **lesson(answer={"version": 1, "loss": 2.5}, **asked))
        store.commit("lesson", **lesson())
        for _ in range(3):  # neither a snapshot nor letting go forgets it
            store.snapshot()
            store.commit("lesson", **lesson())
    with opened(tmp_path) as store:
        assert store.answer_to(**asked) == {"version": 1, "loss": 2.5}
        assert store.answer_to("k2", "ann", "abc") is store.answer_to(None, "ann", "abc") is None
        for other in ({"sender": "bob"}, {"sender": None}, {"content": "abd"}):
            with pytest.raises(KeyReused, match="the key 'k1' was given with something else"):
                store.answer_to(**asked | other)
        with pytest.raises(KeyReused, match="came with record 1"):
            store.commit("lesson", **lesson(**asked))
        assert store.last == 5


# --- what a commit refuses


BACK = {"source": ..., "fields": ..., "delta": ...}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("forget", {}, "kind 'forget'"),
        ("lesson", {"source": ""}, "source=''"),
        ("lesson", {"source": ...}, "source=None"),
        ("lesson", {"target": -1}, "target=-1"),
        ("lesson", {"fields": ...}, "fields and a delta"),
        ("lesson", {"delta": ...}, "fields and a delta"),
        ("drop", {}, "fields and a delta"),
        ("rollback", BACK, "version None is not there"),
        ("rollback", BACK | {"target": 3}, "version 3 is not there: .* has 1 to 2"),
        ("rollback", BACK | {"target": 0}, "version 0 is not there: .* has 1 to 2"),
        ("lesson", {"answer": {"a": float("nan")}}, "the answer is not JSON"),
        ("lesson", {"fields": {"a": (1, 2)}}, "fields is not JSON"),
        ("lesson", {"fields": {1: 2}}, "fields is not JSON"),
        ("lesson", {"delta": Delta({}, {"x": torch.tensor(float("inf"))})}, "not finite"),
        ("lesson", {"delta": Delta({"x": (torch.tensor([1, 1]), torch.ones(2, 1))})}, "each once"),
    ],
)
def test_what_could_not_be_read_again_is_refused(tmp_path, kind, changes, message):
    with opened(tmp_path, keep_snapshots=1) as store:
        store.commit("lesson", **lesson())
        store.snapshot()
        store.commit("lesson", **lesson())
        with pytest.raises(ValueError, match=message):
            store.commit(kind, **lesson(**changes))
        assert store.last == 2
    assert not verify(tmp_path).damage
    with pytest.raises(ValueError, match="is closed"):
        store.commit("lesson", **lesson())
    store.close()
    for wrong in ({"keep_snapshots": 0}, {"sync": "everysec"}):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            opened(tmp_path, **wrong)


# --- threads and processes


def test_commits_and_readers_while_snapshots_are_written(tmp_path):
    oracle = Oracle()
    store = opened(tmp_path, keep_snapshots=2)
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
    kinds = ["lesson"] * 9 + ["drop", "erase"]
    try:
        while oracle.last < 120 or (store.oldest <= 1 and not errors):  # busy machines take longer
            commit(store, oracle, chance.choice(kinds), chance.randrange(99), chance.randrange(99))
            kinds = ["lesson"] if oracle.last > 120 else kinds
    finally:
        done.set()
    for thread in threads:
        thread.join()
    assert not errors
    compare_all(store, oracle)
    store.close()
    with opened(tmp_path) as store:
        compare_all(store, oracle)
        assert store.oldest > 1


def test_a_snapshot_in_the_middle_holds_up_nothing(tmp_path, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    parts = states._parts

    def slowly(state):
        for part in parts(state):
            reached.set()
            assert go_on.wait(300)
            yield part

    monkeypatch.setattr(states, "_parts", slowly)
    oracle = Oracle()
    with opened(tmp_path) as store:
        commit(store, oracle, "lesson", 4, 1)
        thread = threading.Thread(target=store.snapshot)
        thread.start()
        assert reached.wait(300)
        for drawn in [("lesson", 4, 0), ("rollback", 1, 1), ("lesson", 7, 0)]:
            commit(store, oracle, *drawn)
            oracle.compare(store.state_at())
        go_on.set()
        thread.join()
        compare_all(store, oracle)


def test_a_reader_gives_the_versions_of_the_moment_it_began(tmp_path, monkeypatch):
    oracle = Oracle()
    with opened(tmp_path, keep_snapshots=1) as store:
        commit(store, oracle, "lesson", 4, 1)
        begin = Store._reading

        def meanwhile(act):
            once = iter([act])

            @contextmanager
            def reading(self):
                with begin(self) as now:
                    next(once, lambda: None)()
                    yield now

            monkeypatch.setattr(Store, "_reading", reading)

        meanwhile(lambda: commit(store, oracle, "lesson", 4, 2))
        state = store.state_at()
        assert state.version == 1
        oracle.compare(state)
        meanwhile(store.snapshot)  # and version 0 is let go
        assert not store.state_at(0).sources
        assert store.oldest == 2
        compare_all(store, oracle)


def test_a_rollback_while_the_version_it_names_is_let_go(tmp_path, monkeypatch):
    oracle = Oracle()
    with opened(tmp_path, keep_snapshots=1) as store:
        for number in range(3):
            commit(store, oracle, "lesson", 4, number)
            if number == 0:
                store.snapshot()
        stage = states.stage
        drawn = iter([("rollback", 1, 1), ("lesson", 4, 7), ("rollback", 1, 2), ("lesson", 7, 0)])

        def staged(database, *others):
            if database is store._records:
                for each in itertools.islice(drawn, 2):
                    commit(store, oracle, *each)
            return stage(database, *others)

        monkeypatch.setattr(states, "stage", staged)
        store.snapshot()
        assert (store.oldest, store.last, store._roots) == (3, 7, [3, 4, 6])
        compare_all(store, oracle)
    (tmp_path / "snapshots.db").unlink()
    with opened(tmp_path) as store:
        compare_all(store, oracle)
    assert not verify(tmp_path).damage


def test_one_server_at_a_time_and_any_number_that_look(tmp_path):
    with opened(tmp_path) as store:
        store.commit("lesson", **lesson())
        with pytest.raises(BlockingIOError, match="open already, here or in another process"):
            opened(tmp_path)
        assert [line["number"] for line in show(tmp_path)] == [1]
        assert not verify(tmp_path).damage
    with pytest.raises(ValueError, match=r"belongs to \['base'\], not to 'other'"):
        opened(tmp_path, identity="other")
    opened(tmp_path).close()  # a refusal keeps no lock


def test_large_states_go_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "PART", 4000)
    large = {"bank": torch.randn(300, 50), "steps": torch.arange(300)}
    rows = torch.arange(200)
    with opened(tmp_path) as store:
        for number in range(5):
            delta = Delta({"bank": (rows, large["bank"][rows] + number)}, {"steps": large["steps"]})
            store.commit("lesson", **lesson(fields={"n": number}, delta=delta))
        expected = store.state_at().sources["kjv"].delta.to_bytes()
        store.snapshot()
        sizes = store._snapshots._database.execute("SELECT length(delta) FROM parts").fetchall()
        assert len(sizes) > 10
        assert max(sizes)[0] < 4500
        assert store.bytes_to_read == 0
    with opened(tmp_path) as store:
        assert store.state_at().sources["kjv"].delta.to_bytes() == expected


# --- from outside


def test_any_tool_can_read_it(tmp_path):
    """The chain by its description, and a delta by safetensors, with nothing of ours."""
    with opened(tmp_path) as store:
        rows = {"bank": (torch.tensor([1]), torch.ones(1, 2))}
        store.commit("lesson", **lesson(key="k", content="c", answer={"loss": 1.5}, delta=Delta(rows)))
        store.commit("rollback", **lesson(**BACK, target=0, answer={"text": "ü"}))
    database = sqlite3.connect(tmp_path / "lessons.db")
    (identity,) = database.execute("SELECT identity FROM about").fetchone()
    before = hashlib.sha256(identity.encode()).hexdigest()
    columns = "number, kind, source, target, key, sender, content, answer, fields, at, delta_sha256"
    for *told, chain in database.execute(f"SELECT {columns}, chain FROM records ORDER BY number"):
        text = json.dumps([before, *told], separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == chain
        before = chain
    (delta, expected) = database.execute("SELECT delta, delta_sha256 FROM records").fetchone()
    assert hashlib.sha256(delta).hexdigest() == expected
    assert load(delta)["0/bank"].tolist() == [[1, 1]]
    assert load(delta)["rows/0"].tolist() == [1]
    assert database.execute("PRAGMA application_id").fetchone() == (0x41545452,)
    assert database.execute("PRAGMA user_version").fetchone() == (1,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_show_and_history(tmp_path):
    with opened(tmp_path) as store:
        told = {"loss": 1.5, "tokens": 3, "patches": {"0": [1, 2], "3": [0]}, "text": "no number"}
        store.commit("lesson", **lesson(answer=told, fields={"a": 1}))
        store.commit("rollback", **lesson(**BACK, target=0))
        first, second = show(tmp_path)
        assert first.pop("bytes") > 50
        assert len(first.pop("delta_sha256")) == 64
        expected = {
            "number": 1,
            "kind": "lesson",
            "source": "kjv",
            "answer": told,
            "fields": {"a": 1},
            "at": AT,
        }
        assert first == expected
        assert second == {"number": 2, "kind": "rollback", "target": 0, "answer": {}, "at": AT}
        learned = {"version": 1, "kind": "lesson", "source": "kjv", "at": AT, "loss": 1.5, "tokens": 3}
        lines = [{"version": 2, "kind": "rollback", "to": 0, "at": AT}, learned | {"patches": 3}]
        assert store.history(5) == lines
        assert (store.history(1), store.history(5, before=2)) == (lines[:1], lines[1:])


def test_a_backup_is_a_store_that_goes_on(tmp_path):
    folder, oracle = tmp_path / "data", Oracle()
    stop, errors, made = threading.Event(), [], []
    with opened(folder, keep_snapshots=1) as store:
        for number in range(6):
            commit(store, oracle, "lesson", 4, number)
            store.snapshot()

        def copy_on():
            try:
                while not stop.is_set() or not made:
                    made.append(backup(folder, tmp_path / f"copy-{len(made)}").last)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=copy_on)
        thread.start()
        for number in range(40):
            commit(store, oracle, "lesson", 4, number)
        stop.set()
        thread.join()
        with pytest.raises(ValueError, match="is there already"):
            backup(folder, tmp_path / "copy-0")
    assert not errors
    assert made == sorted(made)
    for number in {0, len(made) - 1}:
        with opened(tmp_path / f"copy-{number}") as store:
            assert (store.last, store.oldest) == (made[number], 6)
            oracle.compare(store.state_at())
            store.commit("lesson", **lesson())
        assert not verify(tmp_path / f"copy-{number}").damage
    assert not list(tmp_path.glob(".partial-*"))


def test_folders_that_are_none_of_ours(tmp_path):
    (tmp_path / "old" / "journal").mkdir(parents=True)
    for look in (
        opened,
        verify,
        lambda folder: list(show(folder)),
        lambda folder: backup(folder, tmp_path / "x"),
    ):
        with pytest.raises(ValueError, match=r"holds journal/, which versions before 0.2.0 wrote"):
            look(tmp_path / "old")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="not the data folder of a server"):
            verify(folder)
    (tmp_path / "other").mkdir()
    sqlite3.connect(tmp_path / "other" / "lessons.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(ValueError, match="application_id is 0x0"):
        opened(tmp_path / "other")


def test_a_store_is_verified_while_its_server_goes_on(tmp_path, monkeypatch):
    """What is acknowledged after the check saw the database is not missing from it."""
    check = tools.check_structure
    with opened(tmp_path) as store:

        def commit_first(*arguments, **options):
            store.commit("drop", {}, at=AT, source="a")
            check(*arguments, **options)

        monkeypatch.setattr(tools, "check_structure", commit_first)
        store.commit("drop", {}, at=AT, source="a")
        assert not verify(tmp_path).damage
