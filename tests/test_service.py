"""A server without HTTP: lessons are durable, refused or undone as a whole, and readers never notice."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from served import FOX, LAW, QUICK, hashes, learner, serve

from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guard import Guard
from attractor.continual.guarded import GuardedLearner
from attractor.serve.decode.engine import Job
from attractor.serve.errors import Busy, Refused, Unavailable
from attractor.serve.learning.canaries import Rules
from attractor.serve.learning.readers import MOST_FRAMES
from attractor.serve.service import Limits, Service
from attractor.tokenizer import ByteTokenizer


def text_of(service: Service, seed: int = 0, tokens: int = 12, path: str | None = None) -> list[int]:
    ticket = service.submit(Job(prompt=list(b"the "), max_tokens=tokens, seed=seed, path=path))
    return [written.token for written in ticket]


def refusal(service: Service) -> Refused | None:
    try:
        service.learn([FOX * 8], "fox")
    except Refused as refused:
        return refused
    return None


# --- lessons


def test_a_lesson_answers_with_what_it_did(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        first = service.learn([FOX * 4], "fox", "k1")
        assert first["version"] == service.version == 1
        assert first["tokens"] == len(FOX) * 4
        assert first["taught"] == first["tokens"] - 1
        assert all(1 <= len(patches) <= 3 for patches in first["patches"].values())
        assert first["bytes"] > 0
        later = [service.learn([FOX * 4], "fox") for _ in range(10)]
        assert later[-1]["loss"] < first["loss"] - 0.05
        assert service.paths() == ["base", "fox"]
        assert [line["version"] for line in service.versions(3)] == [11, 10, 9]
        assert [line["version"] for line in service.versions(2, before=5)] == [4, 3]


def test_the_base_keeps_its_bytes(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        before = {name: p.clone() for name, p in service.teacher.learner.base.state_dict().items()}
        for number in range(5):
            service.learn([FOX * 3], f"source-{number % 2}")
        after = service.teacher.learner.base.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_key_is_answered_once(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        first = service.learn([FOX], "fox", "k1")
        before = hashes(service)
        again = service.learn([FOX], "fox", "k1")
        assert again.pop("repeated")
        assert not first.pop("repeated")
        assert again["now"] == first["now"] == 1
        assert again == first
        assert hashes(service) == before
    with serve(tmp_path) as service:
        assert service.learn([FOX], "fox", "k1")["repeated"]
        assert service.version == 1


def test_a_lesson_does_not_read_the_one_before(tmp_path: Path) -> None:
    """The same lesson gives the same weights, whatever another source was taught in between."""
    found = []
    for between in ([], [LAW * 3]):
        with serve(tmp_path / str(len(between))) as service:
            service.learn([FOX * 2], "fox")
            for text in between:
                service.learn([text], "law")
            service.learn([FOX], "fox")
            found.append(hashes(service)["fox"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("texts", "source", "match"),
    [
        ([], "fox", "no text"),
        (["a"], "fox", "text 0 has 1 token"),
        ([FOX, ""], "fox", "empty"),
        ([FOX], "../etc", "cannot name"),
        ([FOX], "base", "cannot name"),
        (["ab" * 40_000], "fox", "at most 65,536 are learned at once"),
    ],
)
def test_wrong_lessons_say_why(tmp_path: Path, texts: list[str], source: str, match: str) -> None:
    with serve(tmp_path) as service, pytest.raises(ValueError, match=match):
        service.learn(texts, source)


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.15), ("cpu", 0.4)])
def test_learning_takes_a_share_of_the_time(device: str, share: float) -> None:
    assert Limits().share_on(device) == share
    assert Limits(learning_share=0.5).share_on(device) == 0.5
    with pytest.raises(ValueError, match=r"learning_share=0\.0 must be 0 < share <= 1"):
        Limits(learning_share=0.0)


# --- taking back


def test_rollback_is_exact_and_reversible(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        seen = [hashes(service)]
        texts = [text_of(service)]
        for number in range(8):
            service.learn([FOX if number % 3 else LAW], "fox" if number % 2 else "law")
            seen.append(hashes(service))
            texts.append(text_of(service))
        for version in (5, 8, 0, 3):
            answer = service.rollback(version)
            assert answer["to"] == version
            assert answer["version"] == service.version
            assert hashes(service) == seen[version]
            assert text_of(service) == texts[version]
        after = service.version
    with serve(tmp_path) as service:
        assert service.version == after
        assert hashes(service) == seen[3]


def test_forgetting_a_source_leaves_the_others_and_nothing_of_it(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
        without = hashes(service)
        service.learn([LAW], "law")
        answer = service.forget("law")
        assert answer["lessons"] == 1
        assert hashes(service) == without
        with pytest.raises(LookupError, match="nothing is kept for 'law'"):
            service.forget("law")
        service.forget("fox")
        assert service.paths() == ["base"]
        alone = text_of(service)
        assert alone == text_of(service, path="base")


def test_versions_that_are_not_kept_are_told(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
        for version in (2, -1):
            with pytest.raises(ValueError, match="there are 0 to 1"):
                service.rollback(version)


# --- the rules


def test_a_path_that_drifts_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    rules = Rules(canary_tokens=32, drift=0.01)
    with serve(tmp_path, rules=rules) as service:
        before = None, 0
        while (refused := refusal(service)) is None:
            before = hashes(service), service.version
        assert "budget of drift is 0.01" in str(refused)
        assert refused.figures["self"]["drift"] > 0.01
        assert before == (hashes(service), service.version)
        assert before[1] > 0


def broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that says it costs nothing, while almost all of its prior is for others than the base."""
    monkeypatch.setattr(Guard, "bound", lambda self, tokens, path="base": 0.0)


def test_readers_do_not_lose_a_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the guard not keep its promise, the canary decides."""
    broken_promise(monkeypatch)
    rules = Rules(canary_tokens=32, drift=None, canary_rise=0.001)
    held = learner(prior=1e-6)
    with Service.open(held, tmp_path, rules=rules, limits=Limits(drain=0.5)) as service:
        while (refused := refusal(service)) is None:
            assert service.version < 100
        assert "canary 'self' would be at" in str(refused)


def test_an_audit_reads_whole_canaries_and_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_promise(monkeypatch)
    base = learner(prior=1e-6)
    # the part that every lesson is judged by is easy to keep: the fox itself; the rest is not
    canary = np.frombuffer((FOX * 4)[:33].encode() + bytes(range(200, 250)) * 4, np.uint8).astype(np.int64)
    rules = Rules(canary_tokens=32, drift=None, canary_rise=0.001, audit_every=4)
    with Service.open(
        base, tmp_path, canaries={"old": canary}, rules=rules, limits=Limits(drain=0.5)
    ) as service:
        service.teacher.canaries.part.pop("self")  # what is not judged before publishing
        answers = [service.learn([FOX * 8], "fox") for _ in range(4)]
        assert [answer["version"] for answer in answers] == [1, 2, 3, 4]
        assert answers[-1]["now"] == 5
        assert service.versions(1)[0] | {"at": ""} == {"version": 5, "kind": "rollback", "to": 0, "at": ""}
        assert service.paths() == ["base"]


def test_quotas(tmp_path: Path) -> None:
    rules = Rules(canary_tokens=32, source_tokens=100)
    with serve(tmp_path, rules=rules) as service:
        service.learn([FOX], "fox")
        service.learn([FOX], "fox")
        with pytest.raises(Refused, match="may teach 100 in all"):
            service.learn([FOX], "fox")
        service.learn([FOX], "other")


def test_there_is_an_end_of_overlays(tmp_path: Path) -> None:
    with Service.open(learner(max_overlays=2), tmp_path, rules=QUICK, limits=Limits(drain=0.5)) as service:
        service.learn([FOX], "a")
        service.learn([FOX], "b")
        with pytest.raises(Refused, match="2 overlays"):
            service.learn([FOX], "c")
        service.forget("a")
        service.learn([FOX], "c")


def test_a_lesson_that_explodes_is_refused(tmp_path: Path) -> None:
    update = UpdateConfig(learning_rate=1e38, rule="sgd")
    held = learner()
    held = GuardedLearner(held.base, ByteTokenizer(), GuardConfig(learn=LearnConfig(update=update)))
    with Service.open(held, tmp_path, rules=QUICK, limits=Limits(drain=0.5)) as service:
        for _ in range(3):
            with pytest.raises(Refused):
                service.learn([FOX * 8], "fox")
        assert service.version == 0
        assert service.paths() == ["base"]


# --- readers


def test_a_text_keeps_its_version_while_lessons_go_on(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX * 4], "fox")
        expected = text_of(service, tokens=60)
        ticket = service.submit(Job(prompt=list(b"the "), max_tokens=60, seed=0))
        got = [next(iter(ticket)).token]
        for _ in range(6):
            service.learn([FOX * 4], "fox")
        got += [written.token for written in ticket]
        assert got == expected
        assert ticket.version == 1
        assert service.version == 7


def test_many_readers_and_writers_at_once(tmp_path: Path) -> None:
    """Every text is exactly what its version would have written alone."""
    texts: dict[int, list[list[int]]] = {}
    failures: list[BaseException] = []
    with serve(tmp_path, limits=Limits(drain=0.5, rows=8)) as service:

        def read() -> None:
            try:
                for _ in range(6):
                    ticket = service.submit(Job(prompt=list(b"the "), max_tokens=10, temperature=0))
                    written = [w.token for w in ticket]
                    assert ticket.finish == "length"
                    texts.setdefault(ticket.version or 0, []).append(written)
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for number in range(12):
            service.learn([FOX * 2], "fox" if number % 2 else "law")
        for reader in readers:
            reader.join()
        assert not failures
        for version, found in texts.items():
            service.rollback(version)
            ticket = service.submit(Job(prompt=list(b"the "), max_tokens=10, temperature=0))
            alone = [w.token for w in ticket]
            assert all(written == alone for written in found), version


def test_too_many_lessons_are_told_to_wait(tmp_path: Path) -> None:
    with serve(tmp_path, limits=Limits(drain=0.5, learning=1)) as service:
        hold, began = threading.Event(), threading.Event()

        def slow(*_: object) -> dict[str, object]:
            began.set()
            hold.wait()
            return {"repeated": True}

        service.teacher.learn = slow  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: service.learn([FOX], "fox"))
        waiting.start()
        began.wait()
        with pytest.raises(Busy, match="1 calls wait") as busy:
            service.learn([FOX], "fox")
        assert busy.value.retry_after >= 1
        back = threading.Thread(target=lambda: service.rollback(0))  # there are places for taking back
        back.start()
        while service.monitor()["queue"]["learning"] < 2:
            pass
        hold.set()
        waiting.join()
        back.join()
        service.learn([FOX], "fox")


def test_versions_that_are_read_do_not_pile_up(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
        read = [service.teacher.publication]
        for _ in range(MOST_FRAMES - 1):
            service.learn([FOX], "fox")
            read.append(service.teacher.publication)
        with pytest.raises(Busy, match="too many earlier versions"):
            service.learn([FOX], "fox")
        service.learn([LAW], "law")
        del read
        service.learn([FOX], "fox")
        service.learn([FOX], "fox")
        assert len(service.teacher.frames["fox"].all) <= 3


def test_without_learning_it_only_reads(tmp_path: Path) -> None:
    with serve(tmp_path, learning=False) as service:
        with pytest.raises(Unavailable, match="does not learn"):
            service.learn([FOX], "fox")
        assert len(text_of(service)) == 12


def test_closing_answers_everybody(tmp_path: Path) -> None:
    service = serve(tmp_path)
    service.learn([FOX], "fox")
    service.close()
    service.close()
    with pytest.raises(Unavailable, match="closing"):
        service.learn([FOX], "fox")
    assert service.ready() == (False, "closing")


def test_another_model_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
    other = learner()
    with torch.no_grad():
        other.base.embedding.weight[0, 0] += 1
    other = GuardedLearner(other.base, ByteTokenizer(), other.config)
    with pytest.raises(ValueError, match="with the model and settings it was written for"):
        Service.open(other, tmp_path)


def test_watchers_see_after_a_restart_what_they_saw_before(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        with serve(tmp_path) as service:
            if not seen:
                service.learn([FOX], "fox")
                service.learn([LAW], "law")
            seen.append(service.monitor())
    assert seen[0]["progressive"] == seen[1]["progressive"]
    assert seen[0]["overlays"] == seen[1]["overlays"]
    assert seen[0]["drift"] == seen[1]["drift"]


def test_what_watchers_see(tmp_path: Path) -> None:
    from pydantic import TypeAdapter

    from attractor.serve.http.status import Monitor

    with serve(tmp_path) as service:
        TypeAdapter(Monitor).validate_python(service.monitor())
        service.learn([FOX], "fox")
        text_of(service)
        told = service.monitor()
        TypeAdapter(Monitor).validate_python(told)
        json.dumps(told, allow_nan=False)
        assert [lesson["source"] for lesson in told["progressive"]] == ["fox"]
        rows = service.teacher.sources["fox"].branch.overlay().delta.rows
        assert told["overlays"]["fox"]["bytes"] == sum(values.nbytes for _, values in rows.values())
        assert told["journal"]["last"] == 1
        assert [seen["version"] for seen in told["canaries"]["self"]] == [0, 1]
