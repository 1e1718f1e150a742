"""Services that share a store: what one is taught, all know, once; who is killed holds up nobody."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replicas
from crashes import Taught, oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import until
from stores import AT
from taught import about, bits, school, serve, text_of

from attractor.continual.parts import lesson_in
from attractor.serve.decode.engine import Job
from attractor.serve.errors import Busy, KeyReused, Refused, StoreDamaged, Unavailable
from attractor.serve.learning.canaries import Rules
from attractor.serve.learning.catalogue import Said, asked, unpack
from attractor.serve.learning.lessons import LessonTeacher, identity_of
from attractor.serve.service import Limits, Service
from attractor.serve.store import Store, backup, database, show, verify
from attractor.serve.store.database import Acknowledged, turn

ANN, BOB, EVE = "Ann Zorvan", "Bob Quillbeam", "Eve Tandoor"
SELDOM = Limits(drain=0.5, follow=3600.0)
"""Such a service follows others when it is to change something itself."""


@pytest.fixture(autouse=True)
def few_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attractor.serve.learning.canaries.PROMPTS", ("Hello", "The capital of"))


def replica(folder: Path, **options: Any) -> Service:
    return serve(folder, shared=True, **({"limits": Limits(drain=0.5, follow=0.02)} | options))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Service, Service]]:
    with replica(tmp_path) as one, replica(tmp_path) as other:
        yield one, other


def same(one: Service, other: Service) -> bool:
    """To the bit, with all that is told of lessons."""
    shown = [service.teacher.catalogue.shown for service in (one, other)]
    return one.version == other.version and bits(one) == bits(other) and shown[0] == shown[1]


# --- what one is taught


def test_a_lesson_taught_to_one_is_known_by_both(pair: tuple[Service, Service]) -> None:
    one, other = pair
    one.learn([about(ANN, "!")], "wiki")
    other.learn([about(BOB, "?")], "news")  # after what it had not followed yet
    until(lambda: same(one, other))
    for name, answer in ((ANN, "!"), (BOB, "?")):
        written = [text_of(service, f"I met {name}") for service in pair]
        assert written[0] == written[1]
        assert written[0][0][0][0] == ord(answer)
    assert [service.monitor()["journal"]["shared"] for service in pair] == [True, True]
    told = [service.monitor()["lessons"] for service in pair]
    assert told[0] == told[1]
    assert [service.monitor()["overlays"].keys() for service in pair] == 2 * [{"wiki", "news"}]


def of_another(service: Service) -> bytes:
    """A file that says something that this server does not know."""
    version = service.version
    service.learn([about(EVE, "!")], "file")
    data = service.export_lessons([max(entry["lesson"] for entry in service.lessons())])
    service.rollback(version)
    return data


CHANGES: dict[str, Callable[[Service], Any]] = {
    "forget one": lambda service: service.forget_lessons([0]),
    "forget what another stands on": lambda service: service.forget("wiki"),
    "erase": lambda service: service.forget_lessons([1], erase=True),
    "revise": lambda service: service.begin(
        "revise", 0, Said(forms=[(f"I met {BOB}", "!"), (f"We saw {BOB}", "!")]), require_known=False
    ).result(),
    "keep nothing": lambda service: service.learn(
        [asked([f"{BOB} is {'and so on' * 6}"], BOB)], "news", "k1", "sender"
    ),
    "rollback": lambda service: service.rollback(2),
    "rollback to the base": lambda service: service.rollback(0),
    "import": lambda service: service.begin("import_lessons", of_another(service), "again").result(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_one_changes_the_other_follows(pair: tuple[Service, Service], change: str) -> None:
    one, other = pair
    one.learn([about(BOB, "!")], "wiki")
    one.learn([about(BOB, "?"), about(ANN, "?")], "news")
    until(lambda: same(one, other))
    before = bits(other)
    CHANGES[change](one)
    until(lambda: same(one, other))
    assert (bits(other) != before) == (change != "keep nothing")
    prompts = [f"I met {name}" for name in (ANN, BOB, EVE)]
    assert [text_of(one, prompt) for prompt in prompts] == [text_of(other, prompt) for prompt in prompts]
    other.rollback(4)
    until(lambda: same(one, other))
    assert (bits(one) == before) == (change != "erase")


def test_a_text_keeps_its_version_while_another_server_teaches(pair: tuple[Service, Service]) -> None:
    one, other = pair
    one.learn([about(ANN, "!")], "wiki")
    until(lambda: same(one, other))
    expected = text_of(other, f"I met {ANN}", tokens=60)[0]
    stream = other.submit(Job(prompt=list(f"I met {ANN}".encode()), max_tokens=60, temperature=0))
    got = [next(iter(stream))]
    one.forget("wiki")
    one.learn([about(ANN, "?")], "wiki")
    got += list(stream)
    assert [(each.token, each.logprob) for each in got] == expected
    until(lambda: same(one, other))
    assert text_of(other, f"I met {ANN}")[0][0][0] == ord("?")


def test_a_key_sent_to_both_teaches_once(pair: tuple[Service, Service]) -> None:
    calls = [service.begin("learn", [about(ANN, "!")], "wiki", "k1", "sender") for service in pair]
    answers = [call.result() for call in calls]
    assert sorted(answer["repeated"] for answer in answers) == [False, True]
    assert answers[0]["lessons"] == answers[1]["lessons"]
    until(lambda: same(*pair))
    assert len(bits(pair[0])) == 1
    for service in pair:
        with pytest.raises(KeyReused):
            service.learn([about(ANN, "?")], "wiki", "k1", "sender")


def test_quotas_and_canaries_count_what_others_taught(tmp_path: Path) -> None:
    with replica(tmp_path) as one:
        prompt = [*f"I met {ANN}".encode(), *(token for token, _ in text_of(one, f"I met {ANN}")[0])]
    rules, folder = Rules(source_tokens=80, canary_rise=1e9, canary_tokens=16), tmp_path / "taught"
    options: dict[str, Any] = {"rules": rules, "canaries": {"news": prompt}}
    with replica(folder, **options) as one, replica(folder, **options) as other:
        other.learn([about(EVE, "!")], "news")  # its canaries are read
        one.learn([about(ANN, "!")], "wiki")
        with pytest.raises(Refused, match="may teach 80 in all"):
            other.learn([about(BOB, "!")], "wiki")
        figures = [service.teacher.canaries.figures()["news"] for service in (one, other)]  # type: ignore[attr-defined]
        assert figures[0] == figures[1]
        assert figures[0]["windows_entered"] == 1
        other.forget("wiki")
        until(lambda: same(one, other))
        until(lambda: one.teacher.canaries.figures()["news"]["windows_entered"] == 0)  # type: ignore[attr-defined]


STEPS = ["ann", "bob", "ann again", "drop 0", "erase 1", "drop wiki", "erase news", "back", "start again"]


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS)), min_size=3, max_size=8))
def test_whatever_happens_both_tell_what_the_disk_tells(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, str]]
) -> None:
    """An oracle that reads only the records, with nothing of ours, finds every byte in both."""
    folder, kind = tmp_path_factory.mktemp("store"), Taught(school=school())
    lessons = {"ann": (ANN, "!", "wiki"), "bob": (BOB, "?", "news"), "ann again": (ANN, "?", "news")}
    services = [replica(folder), replica(folder, limits=SELDOM)]
    try:
        for which, step in steps:
            service, (word, _, what) = services[which], step.partition(" ")
            if step in lessons:
                name, answer, source = lessons[step]
                service.learn([about(name, answer)], source)
            elif step == "back":
                service.rollback(service.version // 2)
            elif step == "start again":
                service.close()
                services[which] = replica(folder)
            else:
                with contextlib.suppress(LookupError):  # there may be nothing to forget
                    if what.isdecimal():
                        service.forget_lessons([int(what)], erase=word == "erase")
                    else:
                        service.forget(what, erase=word == "erase")
        services[1].rollback(max(services[1].store.last - 1, 0))  # it has to catch up
        until(lambda: same(*services))
        assert kind.live(services[0]) == oracle(folder, kind)[0]
    finally:
        for service in services:
            service.close()
    assert not verify(folder).damage


# --- starting, and who may share


def test_servers_that_start_at_once_make_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = database._make

    def make_slowly(*given: Any) -> None:
        made.append(tmp_path)
        time.sleep(0.05)  # for the others to come
        make(*given)

    monkeypatch.setattr(database, "_make", make_slowly)
    school()  # once: its weights are random
    opened: list[Service] = []
    threads = [threading.Thread(target=lambda: opened.append(replica(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(made)) == (3, 1)
    assert [record["kind"] for record in show(tmp_path)] == ["calibration"]
    for service in opened:
        service.close()


def test_a_store_that_another_server_has_just_begun_is_not_begun_again(tmp_path: Path) -> None:
    net, lessons = school()
    identity = identity_of(net, lessons)
    with Store.open(tmp_path, identity=identity, shared=True) as store, replica(tmp_path) as other:
        assert store.last == 0  # as far as it knows
        teacher = LessonTeacher(net, lessons, store, Rules())
        assert (store.last, teacher.calibration_hash) == (1, other.teacher.calibration_hash)  # type: ignore[attr-defined]


def test_one_can_start_and_be_read_while_another_learns(tmp_path: Path) -> None:
    with replica(tmp_path) as one:
        one.learn([about(ANN, "!")], "wiki")
        with one.store.turn(), replica(tmp_path) as other:  # as if a lesson took all this time
            assert same(one, other)
            assert text_of(other, f"I met {ANN}")[0][0][0] == ord("!")


def test_a_server_alone_and_servers_that_share_exclude_each_other(tmp_path: Path) -> None:
    with replica(tmp_path), pytest.raises(BlockingIOError, match=r"is open already.*started with --shared"):
        serve(tmp_path)
    with serve(tmp_path) as alone, pytest.raises(BlockingIOError, match="is open already"):
        replica(tmp_path)
    assert not alone.monitor()["journal"]["shared"]


def test_a_server_that_does_not_learn_follows(tmp_path: Path) -> None:
    with replica(tmp_path) as one, replica(tmp_path, learning=False) as other:
        one.learn([about(ANN, "!")], "wiki")
        until(lambda: same(one, other))
        with pytest.raises(Unavailable, match="this server does not learn"):
            other.learn([about(BOB, "!")], "wiki")


# --- when others are killed, hang, or write what cannot be read

HOLDER = """
import sys
from attractor.serve.store import Store
with Store.open(sys.argv[1], identity=sys.argv[2], shared=True) as store, store.turn():
    store.commit("drop", {}, at="then", source="nobody")
    print("it has the turn", flush=True)
    sys.stdin.read()
"""


def test_one_that_is_killed_in_its_turn_holds_up_nobody(tmp_path: Path) -> None:
    with replica(tmp_path, limits=Limits(drain=0.5, follow=0.02, turn=0.1)) as service:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), service.store.identity]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"it has the turn\n"
            until(lambda: service.version == 2)  # what it committed is followed all the same
            with pytest.raises(Busy, match=r"have been changing it for 0\.1 s") as busy:
                service.learn([about(ANN, "!")], "wiki", "k1")
            assert busy.value.retry_after > 0
            assert bits(service) == {}
            holder.send_signal(signal.SIGKILL)
        assert service.learn([about(ANN, "!")], "wiki", "k1")["version"] == 3
    assert not verify(tmp_path).damage


def test_a_server_that_ends_does_not_wait_for_its_turn(tmp_path: Path) -> None:
    with replica(tmp_path) as one, replica(tmp_path) as other, one.store.turn():
        call = other.begin("learn", [about(ANN, "!")], "wiki")
        until(call.running)
        other.close()
        with pytest.raises(Unavailable, match="is closing"):
            call.result()


def alter(folder: Path, statement: str) -> None:
    records = sqlite3.connect(folder / "lessons.db")
    with contextlib.closing(records), records:
        records.execute(statement)


DAMAGE = {
    "UPDATE records SET delta = zeroblob(1000) WHERE number = 2": "its delta is not what was written",
    "UPDATE records SET delta = NULL WHERE number = 2": "its delta is missing, and was not erased",
    "UPDATE records SET source = 'other' WHERE number = 2": "it is not what was written",
    "UPDATE records SET number = 3 WHERE number = 2": "record 2 is missing",
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_what_cannot_be_read_is_named_and_texts_go_on(
    tmp_path: Path, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with replica(tmp_path, limits=SELDOM) as one, replica(tmp_path, limits=SELDOM) as other:
        one.learn([about(ANN, "!")], "wiki")
        text = text_of(other, f"I met {ANN}")
        alter(tmp_path, statement)
        for _ in range(2):
            with pytest.raises(
                Unavailable, match=f"because record 2 cannot be taken over: {DAMAGE[statement]}"
            ):
                other.learn([about(BOB, "!")], "wiki")
        other._follow()
        other._follow()
        assert sum("lessons.db, record 2" in line for line in caplog.messages) == 1
        assert "record 2 cannot be taken over" in other.monitor()["journal"]["behind"]
        assert other.ready() == (True, "learning is not possible now")
        assert (other.version, bits(other), text_of(other, f"I met {ANN}")) == (1, {}, text)


def test_records_that_were_there_are_missed(pair: tuple[Service, Service], tmp_path: Path) -> None:
    """As where somebody put an older copy in the place of the database."""
    one, other = pair
    one.learn([about(ANN, "!")], "wiki")
    until(lambda: same(one, other))
    alter(tmp_path, "DELETE FROM records WHERE number = 2")
    with pytest.raises(
        Unavailable, match="record 2 cannot be taken over: it was there, and the last one is 1"
    ):
        other.learn([about(BOB, "!")], "wiki")
    assert text_of(one, f"I met {ANN}")[0][0][0] == ord("!")


def test_what_was_committed_and_said_to_have_failed_is_taken_over(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    commit_all = Store.commit_all

    def fail_afterwards(store: Store, *given: Any, **options: Any) -> int:
        commit_all(store, *given, **options)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit_all", fail_afterwards)
        with pytest.raises(Unavailable, match="Input/output error"):
            one.learn([about(ANN, "!")], "wiki", "k1")
    until(lambda: one.version == 2 and same(one, other))
    assert one.learn([about(ANN, "!")], "wiki", "k1")["repeated"]


def test_what_could_not_be_read_for_a_moment_is_taken_over_later(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(other.store, "state_at", broken)
        one.learn([about(ANN, "!")], "wiki")
        until(lambda: other.monitor()["journal"]["behind"])
        assert bits(other) == {}
    until(lambda: same(one, other))
    until(lambda: other.monitor()["journal"]["behind"] is None)


@pytest.mark.slow
def test_two_processes_know_all_while_either_is_killed() -> None:
    """The short form of benchmarks/replicas.py, which says how long things take."""
    command = [sys.executable, replicas.__file__, "--lessons", "12", "--every", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert replicas.holds(found)
    assert found["lessons_in_the_end"] == 12
    assert sum(found["kills"].values()) > 0


# --- the store itself


def shared(folder: Path) -> Store:
    return Store.open(folder, identity="base", shared=True)


def test_a_shared_store_is_changed_in_turns_and_has_no_snapshots(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity="base") as store:
        store.commit("drop", {}, at=AT, source="a")
        store.snapshot()
    with shared(tmp_path) as store:
        assert not (tmp_path / "snapshots.db").exists()
        with pytest.raises(ValueError, match="others share the store"):
            store.commit("drop", {}, at=AT, source="a")
        with pytest.raises(ValueError, match="is shared, and has no snapshots"):
            store.snapshot()
        with store.turn():
            assert store.commit("erase", {}, at=AT, source="a") == 2
    with pytest.raises(ValueError, match="sync='off' is not for a store that servers share"):
        Store.open(tmp_path, identity="base", shared=True, sync="off")


def test_nobody_has_two_turns_while_another_one_waits(tmp_path: Path) -> None:
    order, waits = [], threading.Event()

    def wait() -> None:
        waits.set()
        time.sleep(0.001)

    def second() -> None:
        with turn(tmp_path, wait):
            order.append("second")

    thread = threading.Thread(target=second)
    with turn(tmp_path, wait):
        order.append("first")
        thread.start()
        assert waits.wait(60)
    with turn(tmp_path, lambda: time.sleep(0.001)):
        order.append("first again")
    thread.join()
    assert order == ["first", "second", "first again"]


def test_the_promise_is_of_the_newest_record_whoever_made_it(tmp_path: Path) -> None:
    promise = Acknowledged(tmp_path)
    with shared(tmp_path) as one:
        with shared(tmp_path) as other:
            for store in (one, other, other):
                with store.turn():
                    store.commit("drop", {}, at=AT, source="a")
        assert (one.last, other.last) == (1, 3)
        assert promise.read() == (3, other.outline.chain)  # also after the one that is behind has ended
    assert promise.read() == (3, other.outline.chain)
    promise.path.unlink()  # as if the last one was killed before it could write it
    with shared(tmp_path) as store, store.turn():
        assert promise.read() == (3, store.outline.chain)
    alter(tmp_path, "DELETE FROM records WHERE number = 3")
    with pytest.raises(StoreDamaged, match="record 3 was acknowledged"):
        shared(tmp_path)


DYING = """
import os, sys
from crashes import die_at
from attractor.serve.store import Store
for line in sys.stdin:
    if not (child := os.fork()):
        point, count = line.rsplit(" ", 1)
        die_at(point, int(count))
        with Store.open(sys.argv[1], identity="base", shared=True) as store, store.turn():
            store.commit("drop", {}, at="then", source="dying")
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
DEATHS = {
    "BEGIN IMMEDIATE 1": False, "INSERT INTO records 1": False, "COMMIT 1": False,
    "before acknowledged 2": True, "after acknowledged 2": True,  # the first time is when its turn begins
}  # fmt: skip
"""Where one is killed, and whether what it committed is there."""


def test_who_is_killed_at_any_point_of_a_commit_leaves_a_whole_store(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, str(tmp_path)]
    with (
        shared(tmp_path) as store,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as dying,
    ):
        assert dying.stdin is not None
        assert dying.stdout is not None
        for death, is_there in DEATHS.items():
            last = store.last
            print(death, file=dying.stdin, flush=True)
            assert dying.stdout.readline() == f"{-signal.SIGKILL}\n", death
            with store.turn():
                assert store.last == last + is_there, death
                assert Acknowledged(tmp_path).read() == (store.last, store.outline.chain), death
                assert store.commit("drop", {}, at=AT, source="living") == last + is_there + 1, death
        dying.stdin.close()
    assert verify(tmp_path).damage == []


def test_what_is_erased_by_one_while_another_reads_is_no_damage(tmp_path: Path) -> None:
    with replica(tmp_path, limits=SELDOM) as one, replica(tmp_path, limits=SELDOM) as other:
        one.learn([about(ANN, "!"), about(BOB, "!")], "wiki")
        other.learn([about(EVE, "!")], "news")
        one.forget("wiki", erase=True)
        assert other.version == 4
        base = other.store.identity.split("/")[0]
        kept = unpack(other.export_lessons(), base)[1]  # without what it still has in memory
        assert [lesson_in(delta).subject for delta in kept] == [EVE]
        with pytest.raises(LookupError, match="there is no lesson 0"):
            other.export_lessons([0])
        one.rollback(4)  # when the other one had what is erased
        with pytest.raises(LookupError, match="nothing is kept for 'wiki'"):
            other.forget("wiki")
        assert same(one, other)
        assert list(bits(other)) == ["2"]
    found = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert ANN.encode() not in found


def test_a_backup_beside_servers_that_share(pair: tuple[Service, Service], tmp_path: Path) -> None:
    pair[0].learn([about(ANN, "!")], "wiki")
    pair[1].learn([about(BOB, "!")], "wiki")
    report = backup(tmp_path, tmp_path / "copy")
    assert (report.last, report.damage) == (3, [])
    with serve(tmp_path / "copy") as copied:
        assert bits(copied) == bits(pair[1])
