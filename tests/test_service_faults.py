"""A server without HTTP, when the disk, memory or an audit fails: nothing is lost, nobody waits for ever."""

import errno
import sqlite3
import threading
from pathlib import Path

import pytest
from crashes import Texts, live_hash, oracle
from disk import Disk, needs_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import FOX, LAW, hashes, serve

from attractor.serve.decode.engine import Job
from attractor.serve.errors import KeyReused, Refused, Unavailable
from attractor.serve.learning.canaries import Rules
from attractor.serve.service import Limits, Service
from attractor.serve.store import State, verify


def text_of(service: Service, seed: int = 0, tokens: int = 12, path: str | None = None) -> list[int]:
    ticket = service.submit(Job(prompt=list(b"the "), max_tokens=tokens, seed=seed, path=path))
    return [written.token for written in ticket]


# --- the disk


@needs_disk
def test_a_full_disk_stops_learning_and_nothing_else(tmp_path: Path) -> None:
    with Disk() as disk, serve(tmp_path) as service:
        service.learn([FOX], "fox")
        before, text = hashes(service), text_of(service)
        disk.fault = lambda *_: sqlite3.SQLITE_FULL
        for action in (
            lambda: service.learn([FOX], "fox"),
            lambda: service.learn([LAW], "law"),
            lambda: service.rollback(0),
            lambda: service.forget("fox"),
            lambda: service.forget("fox", erase=True),
        ):
            with pytest.raises(Unavailable, match="No space left"):
                action()
        assert hashes(service) == before
        assert text_of(service) == text
        assert service.ready() == (True, "learning is not possible now")
        disk.fault = lambda *_: 0
        assert service.learn([LAW], "law")["version"] == 2
        assert service.ready() == (True, "ready")
    with serve(tmp_path) as service:
        assert service.version == 2


STEPS = ["fox", "law", "drop fox", "erase fox", "back", "snapshot", "restart"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(STEPS), max_size=12))
def test_whatever_happens_the_disk_tells_the_same(tmp_path_factory, steps: list[str]) -> None:  # type: ignore[no-untyped-def]
    """An oracle that knows only the records rebuilds weights and moments."""
    folder = tmp_path_factory.mktemp("store")
    service = serve(folder, limits=Limits(drain=0.5, keep_snapshots=50))
    try:
        for step in steps:
            if step in ("fox", "law"):
                service.learn([FOX if step == "fox" else LAW], step)
            elif step in ("drop fox", "erase fox") and "fox" in service.paths():
                service.forget("fox", erase=step == "erase fox")
            elif step == "back":
                service.rollback(service.version // 2)
            elif step == "snapshot":
                service.store.snapshot()
            elif step == "restart":
                service.close()
                service = serve(folder, limits=Limits(drain=0.5, keep_snapshots=50))
        assert live_hash(service) == oracle(folder, Texts(service.teacher.learner))[0]
    finally:
        service.close()


# --- what goes wrong in between


def test_a_key_is_for_one_thing(tmp_path: Path) -> None:
    """Another lesson, or a rollback that is answered as a lesson, would look done and is not."""
    with serve(tmp_path) as service:
        service.learn([FOX], "fox", "k1")
        service.learn([LAW], "law")
        for action in (
            lambda: service.learn([LAW], "fox", "k1"),
            lambda: service.learn([FOX, FOX], "fox", "k1"),
            lambda: service.learn([FOX], "law", "k1"),
            lambda: service.learn([FOX], "fox", "k1", sender="mallory"),
            lambda: service.rollback(0, "k1"),
            lambda: service.forget("fox", "k1"),
        ):
            with pytest.raises(KeyReused, match="with something else before"):
                action()
        service.forget("fox", "k2", sender="ann")
        assert service.forget("fox", "k2", sender="ann")["repeated"]
        for action in (
            lambda: service.forget("law", "k2", sender="ann"),
            lambda: service.forget("fox", "k2"),
            lambda: service.forget("fox", "k2", sender="ann", erase=True),
        ):
            with pytest.raises(KeyReused, match="with something else before"):
                action()
        service.rollback(1, "k3")
        assert service.rollback(1, "k3")["repeated"]
        for action in (lambda: service.rollback(0, "k3"), lambda: service.learn([FOX], "fox", "k3")):
            with pytest.raises(KeyReused, match="with something else before"):
                action()
        assert service.version == 4


def test_what_was_erased_no_rollback_brings_back(tmp_path: Path) -> None:
    """And what was only forgotten does come back."""
    with serve(tmp_path) as service:
        service.learn([LAW], "law")
        alone = hashes(service)
        service.learn([FOX], "fox")
        both = hashes(service)
        service.forget("fox")
        service.rollback(2)
        assert hashes(service) == both
        service.forget("fox")
        assert service.forget("fox", erase=True)["erased"]  # of what is not live any more
        for version in (2, 4):
            service.rollback(version)
            assert hashes(service) == alone
        with pytest.raises(LookupError, match="nothing is kept for 'fox'"):
            service.forget("fox", erase=True)
        service.learn([FOX], "fox")
        assert hashes(service) == both
        after = service.version
    with serve(tmp_path) as service:
        assert (service.version, hashes(service)) == (after, both)


def fail_audits(service: Service) -> None:
    judge = service.teacher.canaries.judge

    def strict(*arguments: object, whole: bool = False) -> dict[str, object]:
        if whole:
            raise Refused("it fell")
        return judge(*arguments)  # type: ignore[arg-type]

    service.teacher.canaries.judge = strict  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("restart", [False, True])
def test_an_audit_brings_back_nothing_that_was_taken_back(tmp_path: Path, restart: bool) -> None:
    rules = Rules(canary_tokens=32, canary_rise=0.1, audit_every=2)
    service = serve(tmp_path, rules=rules)
    try:
        service.learn([FOX], "fox")
        service.learn([LAW], "law")  # audited, and well
        service.forget("fox")
        before = hashes(service)
        if restart:
            service.close()
            service = serve(tmp_path, rules=rules)
        fail_audits(service)
        service.learn([LAW], "law")
        assert service.learn([LAW], "law")["now"] == 6
        assert service.versions(1)[0]["to"] == 3
        assert hashes(service) == before
    finally:
        service.close()


def test_an_audit_that_cannot_be_done_denies_no_lesson(tmp_path: Path) -> None:
    rules = Rules(canary_tokens=32, canary_rise=0.1, audit_every=2)
    with serve(tmp_path, rules=rules) as service:
        service.learn([FOX], "fox")
        service.learn([FOX], "fox")
        good = hashes(service)
        fail_audits(service)
        read, service.store.state_at = service.store.state_at, unreadable  # type: ignore[method-assign]
        service.learn([FOX], "fox")
        assert service.learn([FOX], "fox")["now"] == 4
        with pytest.raises(Unavailable, match="version 1 cannot be read"):
            service.rollback(1)
        service.store.state_at = read  # type: ignore[method-assign]
        assert service.learn([FOX], "fox")["now"] == 6
        assert hashes(service) == good


def unreadable(*_: object) -> State:
    raise OSError(errno.EIO, "Input/output error")


def test_what_cannot_be_rebuilt_is_not_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
        service.learn([FOX], "fox")
        before = hashes(service)
        with monkeypatch.context() as patch:
            patch.setattr("attractor.serve.learning.guarded.fill", broken)
            with pytest.raises(MemoryError):
                service.rollback(1)
        assert (service.version, service.store.last, hashes(service)) == (2, 2, before)
        service.learn([FOX], "fox")
        live = hashes(service)
    with serve(tmp_path) as service:
        assert hashes(service) == live


def test_a_version_that_cannot_be_shown_is_the_last(tmp_path: Path) -> None:
    """It is durable; nothing is built upon what is not, and a start has it."""
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
        service.teacher._publish, publish = broken, service.teacher._publish  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            service.forget("fox")
        service.teacher._publish = publish  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="start the server again"):
            service.learn([LAW], "law")
        assert service.paths() == ["base", "fox"]
    with serve(tmp_path) as service:
        assert (service.version, service.paths()) == (2, ["base"])


def broken(*_: object, **__: object) -> None:
    raise MemoryError


def test_the_writer_outlives_a_snapshot_that_fails(tmp_path: Path) -> None:
    with serve(tmp_path, limits=Limits(drain=0.5, snapshot_every=1)) as service:
        service.store.snapshot = broken  # type: ignore[method-assign,assignment]
        service.learn([FOX], "fox")
        service.learn([FOX], "fox")
        assert service.ready() == (True, "ready")


def test_a_server_that_ends_writes_a_snapshot_only_where_a_start_would_read_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, expected in ((1 << 30, []), (0, [2])):
        monkeypatch.setattr("attractor.serve.service.READ_AGAIN", most)
        with serve(tmp_path) as service:
            service.learn([FOX], "fox")
        assert verify(tmp_path).snapshots == expected


def test_an_engine_that_ended_is_not_ready(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.engine.close(0.0)
        assert service.ready() == (False, "the engine has stopped")


def test_closing_finishes_what_was_begun_and_no_more(tmp_path: Path) -> None:
    service = serve(tmp_path)
    hold, began = threading.Event(), threading.Event()
    answers: list[object] = []

    def slow(*_: object) -> dict[str, object]:
        began.set()
        hold.wait()
        return {"repeated": True}

    service.teacher.learn = slow  # type: ignore[method-assign]

    def ask(action) -> None:  # type: ignore[no-untyped-def]
        try:
            answers.append(action())
        except Unavailable as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, args=(lambda: service.learn([FOX], "fox"),))]
    threads[0].start()
    began.wait()
    threads.append(threading.Thread(target=ask, args=(lambda: service.learn([FOX], "fox"),)))
    threads[1].start()
    while service.monitor()["queue"]["learning"] < 2:
        pass
    threads.append(threading.Thread(target=service.close))
    threads[2].start()
    while not service._closed:
        pass
    hold.set()
    for thread in threads:
        thread.join()
    assert len(answers) == 2
    assert {"repeated": True} in answers
    assert "the server is closing" in answers
    assert service.version == 0
