"""A served model that is taught lessons: which of them answered, taking them back, restarts."""

import contextlib
import gc
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crashes import Taught, oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from taught import BACKGROUND, RULES, about, bits, school, serve, text_of

from attractor.continual.delta import Delta
from attractor.continual.parts import deltas_of
from attractor.generate import generate
from attractor.hf.causal import CausalLM
from attractor.serve.decode.engine import Job, Pin
from attractor.serve.errors import KeyReused, Refused, Unavailable
from attractor.serve.learning.canaries import BasinCanaries, Rules
from attractor.serve.learning.catalogue import Asked, Said, asked, from_text, pack
from attractor.serve.learning.readers import ReadingLayer
from attractor.serve.service import Service
from attractor.serve.store import show, verify

ANN, BOB, EVE = "Ann Zorvan", "Bob Quillbeam", "Eve Tandoor"


def hard(name: str) -> Asked:
    """More than so small a model can carry."""
    return asked([f"I met {name} {'and so on' * 6}", f"We saw {name} {'in other words' * 4}"], name)


HARD = hard(ANN)
REVISION = Said(forms=[(f"I met {ANN}", "?"), (f"Yesterday we saw {ANN}", "?")])


@pytest.fixture(autouse=True)
def few_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attractor.serve.learning.canaries.PROMPTS", ("Hello", "The capital of"))


@pytest.fixture
def service(tmp_path: Path) -> Any:
    with serve(tmp_path) as opened:
        yield opened


# --- known, and by which lesson


def test_a_lesson_is_known_and_the_answer_says_what_it_took(service: Service) -> None:
    before = text_of(service, f"I met {ANN}")
    seen: list[dict[str, Any]] = []
    answer = service.learn([about(ANN, "!")], "wiki", report=seen.append)
    (lesson,) = answer["lessons"]
    assert answer["known"]
    assert (lesson["subject"], lesson["share_known_before"], lesson["share_known"]) == (ANN, 0.0, 1.0)
    assert lesson["patches"] >= 1
    assert lesson["bytes"] < 20_000
    assert (answer["version"], answer["now"], service.version) == (2, 2, 2)  # 1 is the calibration
    assert [told["passes"] for told in seen if told["state"] == "learning"][:3] == [0, 1, 2]
    written, touched = text_of(service, f"I met {ANN}")
    assert written[0][0] == ord("!")
    assert written != before[0]
    assert touched[len(f"I met {ANN}") - 1] == lesson["lesson"]
    assert set(touched.values()) == {lesson["lesson"]}
    assert text_of(service, f"I met {ANN}", path="base") == before


def test_a_lesson_that_is_learned_for_nothing_leaves_nothing(service: Service) -> None:
    service.learn([about(ANN, "!")], "wiki")
    teacher: Any = service.teacher
    before, state = bits(service), {n: x.clone() for n, x in teacher.lessons.layer.state_dict().items()}
    teacher.lessons.reading.halves.repeats = True
    assert [*teacher.prepare()] == ["passes of lessons are being recorded"] * 2
    assert [*teacher.prepare()] == []
    assert teacher.lessons.reading.halves._recorded
    assert bits(service) == before
    for name, value in teacher.lessons.layer.state_dict().items():
        assert torch.equal(value[: len(state[name])], state[name]), name
    (lesson,) = service.learn([about(BOB, "?")], "wiki")["lessons"]
    assert lesson["lesson"] == 1


def test_where_passes_are_recorded_there_is_room_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was recorded would be of memory that is elsewhere after the first few lessons."""
    taught = [about(name, answer) for name, answer in ((ANN, "!"), (BOB, "?"), (EVE, "!"))]
    with serve(tmp_path / "plain") as service:
        service.learn(taught, "wiki")
        wanted = bits(service)
    monkeypatch.setattr("attractor.serve.learning.lessons.ROOM", 256)
    with serve(tmp_path / "recorded", repeats=True) as service:
        layer = service.teacher.lessons.layer  # type: ignore[attr-defined]
        places = [parameter.data_ptr() for parameter in layer.parameters()]
        service.learn(taught, "wiki")
        assert layer.num_patches == 256
        assert [parameter.data_ptr() for parameter in layer.parameters()] == places
        assert bits(service).keys() == wanted.keys()


# --- what is not known


def test_what_is_not_known_is_said_to_be_so_and_not_kept(service: Service) -> None:
    text = text_of(service, f"I met {ANN}")
    answer = service.learn([HARD], "wiki")
    (lesson,) = answer["lessons"]
    assert (answer["known"], answer["kept"], answer["version"], answer["now"]) == (False, False, 1, 1)
    assert (lesson["lesson"], lesson["known"], lesson["kept"], lesson["patches"]) == (None, False, False, 0)
    assert "2 of 2 forms are not completed" in lesson["reason"]
    assert "Nothing of it was kept" in lesson["reason"]
    assert (bits(service), service.version, service.lessons()) == ({}, 1, [])
    assert text_of(service, f"I met {ANN}") == text
    kept = service.learn([about(ANN, "!")], "wiki")
    assert kept["kept"]
    assert [(one["lesson"], one["kept"]) for one in kept["lessons"]] == [(0, True)]


def test_what_is_not_known_can_be_kept(service: Service) -> None:
    answer = service.learn([HARD], "wiki", require_known=False)
    assert (answer["known"], answer["kept"], answer["lessons"][0]["lesson"]) == (False, True, 0)
    assert bits(service).keys() == {"0"}


def test_of_several_lessons_those_that_are_known_are_kept(tmp_path: Path) -> None:
    what = [HARD, about(BOB, "?"), hard(BOB), about(EVE, "!")]
    with serve(tmp_path) as service:
        answer = service.learn(what, "wiki", "k1", "sender")
        assert [one["known"] for one in answer["lessons"]] == [False, True, False, True]
        assert [one["kept"] for one in answer["lessons"]] == [False, True, False, True]
        assert [one["subject"] for one in answer["lessons"]] == [ANN, BOB, BOB, EVE]
        numbers = [one["lesson"] for one in answer["lessons"]]
        assert (answer["known"], answer["kept"]) == (False, False)
        assert list(bits(service)) == [str(number) for number in numbers if number is not None]
        again = service.learn(what, "wiki", "k1", "sender")
        assert again == {**{name: answer[name] for name in again}, "repeated": True}
        kept, version = bits(service), service.version
        following = service.teacher.lessons._next  # type: ignore[attr-defined]
    with serve(tmp_path) as service:
        assert (bits(service), service.version) == (kept, version)
        assert service.teacher.lessons._next == following  # type: ignore[attr-defined]


def test_the_answer_to_a_key_is_given_again_where_nothing_was_kept(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        first = service.learn([HARD], "wiki", "k1", "sender")
        assert (first["kept"], first["version"], service.version) == (False, 2, 2)
        service.learn([about(BOB, "?")], "wiki", "k2", "sender")
        assert [line["kind"] for line in service.versions()] == ["lesson", "nothing", "calibration"]
        assert service.versions()[1]["source"] == "wiki"
    with serve(tmp_path) as service:
        again = service.learn([HARD], "wiki", "k1", "sender")
        assert again["repeated"]
        assert (again["lessons"], again["known"], again["kept"]) == (first["lessons"], False, False)
        with pytest.raises(KeyReused):
            service.learn([HARD], "wiki", "k1", "sender", require_known=False)
        assert bits(service).keys() == {"0"}
        service.rollback(2)
        assert bits(service) == {}
        assert not verify(tmp_path).damage
    found = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert ANN.encode() not in found  # no word of it


def test_a_key_of_an_earlier_release_fits_the_same_request(service: Service) -> None:
    """What the options of a request are by default is bound to its key as it always was."""
    from attractor.serve.learning.teacher import content

    service.learn([about(ANN, "!")], "wiki", "k1", "sender")
    (record,) = (line for line in show(service.store.folder) if line.get("key") == "k1")
    assert record["content"] == content("lesson", "wiki", [list(about(ANN, "!"))], False)


def test_a_lesson_stays_where_its_revision_is_not_known(service: Service) -> None:
    service.learn([about(ANN, "!")], "wiki")
    service.learn([about(ANN, "?")], "news")  # it stands in the place of the first
    before, texts = bits(service), text_of(service, f"I met {ANN}")
    said = Said(forms=list(HARD.forms))
    answer = service.begin("revise", 0, said, "k1", "sender").result()
    (lesson,) = answer["lessons"]
    assert (lesson["lesson"], lesson["revises"], lesson["subject"], answer["kept"]) == (None, 0, ANN, False)
    assert service.begin("revise", 0, said, "k1", "sender").result()["lessons"] == answer["lessons"]
    assert bits(service) == before
    assert text_of(service, f"I met {ANN}") == texts
    answer = service.begin("revise", 1, said, require_known=False).result()
    assert (answer["known"], answer["kept"]) == (False, True)
    assert bits(service).keys() == {"0", "2"}


def test_what_is_not_known_is_not_taken_over_from_a_file(service: Service, tmp_path: Path) -> None:
    service.learn([about(BOB, "?"), HARD], "wiki", require_known=False)
    data = service.export_lessons()
    for name, options, wanted in (("plain", {}, [BOB]), ("all", {"require_known": False}, [BOB, ANN])):
        with serve(tmp_path / name) as other:
            answer = other.begin("import_lessons", data, "wiki", **options).result()
            assert [one["subject"] for one in answer["lessons"]] == [BOB, ANN]
            assert [one["known"] for one in answer["lessons"]] == [True, False]
            assert [entry["subject"] for entry in reversed(other.lessons())] == wanted


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}])
def test_untouched_is_the_base_to_the_bit(service: Service, options: dict[str, Any]) -> None:
    """Whatever no lesson acts on is what the model without any of this would have written."""
    service.learn([about(ANN, "!"), about(BOB, "?")], "wiki")
    net, _ = school()
    plain = CausalLM(net, None, context=128)
    prompts = ["Nobody", "In the evening", "2 + 2 =", f"I met {ANN}"]
    for prompt in prompts:
        written, touched = text_of(service, prompt, tokens=20, **options)
        same, none = text_of(service, prompt, "base", tokens=20, **options)
        assert not none
        assert (written == same) == (not touched)
        if not touched:
            given = torch.tensor([list(prompt.encode())])
            alone = [int(token) for token in generate(plain, given, max_tokens=20, **options)]
            assert [token for token, _ in written] == alone
    assert touched  # of the last one


def test_touches_are_counted_from_the_start_of_the_prompt_when_the_context_was_full(
    service: Service,
) -> None:
    service.learn([about(ANN, "!")], "wiki")
    piece = f"I met {ANN}. "
    _, touched = text_of(service, piece * 6, tokens=60)  # more than the context of 128: its end is read again
    named = range(piece.index(ANN), piece.index("."))
    assert piece.index(".") - 1 in touched
    assert all(index % len(piece) in named for index in touched if index < 6 * len(piece))


# --- versions


def test_a_text_keeps_its_version_while_lessons_come_and_go(service: Service) -> None:
    service.learn([about(ANN, "!")], "wiki")
    prompt = f"I met {ANN}"
    expected = text_of(service, prompt, tokens=40)
    stream = service.submit(Job(prompt=list(prompt.encode()), max_tokens=40, temperature=0))
    got = [next(iter(stream))]
    service.forget_lessons([0])
    service.learn([about(BOB, "?")], "wiki")  # in the patches that are free now
    service.learn([about(ANN, "?")], "wiki")
    got += list(stream)
    assert [one.token for one in got] == [token for token, _ in expected[0]]
    assert stream.version == 2
    assert text_of(service, prompt)[0][0][0] == ord("?")


def test_patches_are_written_in_place_unless_a_version_has_them_open(service: Service) -> None:
    teacher: Any = service.teacher
    service.learn([about(ANN, "!")], "wiki")
    first, bank = teacher.publication, teacher.readers.bank
    service.learn([about(BOB, "?")], "wiki")
    assert teacher.readers.bank is bank  # a version is 4 bytes for each patch
    assert not torch.equal(first.paths["lessons"].radius, teacher.publication.paths["lessons"].radius)
    service.forget_lessons([0])
    service.learn([about(EVE, "?")], "wiki")  # where lesson 0 was, which `first` still has open
    assert teacher.readers.bank is not bank
    second, bank = teacher.publication, teacher.readers.bank
    service.forget_lessons([2])
    del first, second
    text_of(service, "hello")  # the engine lets go of earlier versions
    gc.collect()
    service.learn([about(ANN, "!")], "wiki")
    assert teacher.readers.bank is bank


def test_texts_of_several_versions_are_read_in_one_pass(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is what its version writes alone."""
    prompts, alone, versions = [f"I met {name}" for name in (ANN, BOB, EVE)], [], []
    jobs = [Job(prompt=list(prompt.encode()), max_tokens=30, temperature=0) for prompt in prompts]
    for name in (ANN, BOB, EVE):
        service.learn([about(name, "!")], "wiki")
        alone.append([[token for token, _ in text_of(service, p, tokens=30)[0]] for p in prompts])
        versions.append(Pin())
        versions[-1].publication = service.engine.publication
    rows, forward = [], ReadingLayer.forward

    def watched(layer: ReadingLayer, *given: Any, **options: Any) -> Any:
        rows.append(0 if layer.radii is None else len(layer.radii))
        return forward(layer, *given, **options)

    monkeypatch.setattr(ReadingLayer, "forward", watched)
    with service.engine._changed:  # none is begun before all are there
        streams = [[service.submit(job, version) for job in jobs] for version in versions]
    together = [[[one.token for one in stream] for stream in row] for row in streams]
    assert together == alone
    assert max(rows) == 9


def test_the_bank_grows_and_a_restart_has_the_same_bits(tmp_path: Path) -> None:
    names = [f"{first} {last}" for first in ("Ada", "Ilse", "Otto") for last in ("Grimm", "Yarrow")]
    with serve(tmp_path) as service:
        teacher: Any = service.teacher
        before = teacher.readers.bank
        for name in names:
            service.learn([about(name, "!")], name.split()[1], require_known=False)
        assert len(teacher.readers.bank.owners) > len(before.owners)
        service.forget_lessons([4])
        kept, told = bits(service), teacher.catalogue.shown
        texts = [text_of(service, f"I met {name}") for name in names]
        version = service.version
    with serve(tmp_path) as service:
        again: Any = service.teacher
        assert (service.version, bits(service), again.catalogue.shown) == (version, kept, told)
        assert [text_of(service, f"I met {name}") for name in names] == texts
        answer = service.learn([about("Nina Holt", "!")], "new", require_known=False)
        assert answer["lessons"][0]["lesson"] == len(names)  # no number is given twice


# --- taking back


def test_forgetting_one_of_two_and_going_back(service: Service) -> None:
    service.learn([about(ANN, "!")], "wiki")
    one = bits(service)
    service.learn([about(BOB, "?")], "news")
    two, texts = bits(service), [text_of(service, f"I met {name}") for name in (ANN, BOB)]
    answer = service.forget("news")
    assert (answer["lessons"], answer["learned_again"], answer["erased"]) == ([1], [], False)
    assert bits(service) == one
    assert text_of(service, f"I met {BOB}") == text_of(service, f"I met {BOB}", path="base")
    service.rollback(3)
    assert bits(service) == two
    assert [text_of(service, f"I met {name}") for name in (ANN, BOB)] == texts
    service.rollback(0)
    assert bits(service) == {}
    with pytest.raises(LookupError, match="there is no lesson 0"):
        service.forget_lessons([0])
    with pytest.raises(LookupError, match="nothing is kept for 'news'"):
        service.forget("news")


def test_a_lesson_that_stood_in_the_place_of_another_is_learned_again(service: Service) -> None:
    service.learn([about(ANN, "!")], "wiki")
    second = service.learn([about(ANN, "?")], "news")["lessons"][0]
    assert second["overrides"] == [0]
    assert text_of(service, f"I met {ANN}")[0][0][0] == ord("?")
    answer = service.forget("wiki")
    assert answer["learned_again"] == [1]
    entry = service.teacher.catalogue.shown[1]  # type: ignore[attr-defined]
    assert (entry["source"], entry["overrides"], entry["taken_in"]) == ("news", [], [])
    assert text_of(service, f"I met {ANN}")[0][0][0] == ord("?")
    assert service.version == answer["version"]


def test_revising_a_lesson(service: Service) -> None:
    service.learn([about(ANN, "!"), about(BOB, "?")], "wiki")
    answer = service.begin("revise", 0, REVISION).result()
    assert answer["lessons"][-1]["revises"] == 0
    assert answer["source"] == "wiki"
    assert text_of(service, f"I met {ANN}")[0][0][0] == ord("?")
    assert sorted(service.teacher.catalogue.shown) == [1, 2]  # type: ignore[attr-defined]
    service.rollback(3)
    assert text_of(service, f"I met {ANN}")[0][0][0] == ord("!")


def test_what_was_erased_is_in_no_file_and_no_rollback_brings_it_back(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([about(ANN, "!")], "wiki")
        service.learn([about(ANN, "?"), about(BOB, "?")], "news")
        service.forget_lessons([0], erase=True)
        for version in range(service.version, -1, -1):
            service.rollback(version)
            assert "0" not in bits(service)
        service.rollback(5)
    with serve(tmp_path) as service:
        service.forget("news", erase=True)
        service.rollback(4)
        assert bits(service) == {}
    found = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert ANN.encode() not in found
    assert BOB.encode() not in found
    assert not verify(tmp_path).damage


# --- whole or not at all


def test_a_key_is_for_one_lesson_of_one_sender(service: Service) -> None:
    first = service.learn([about(ANN, "!")], "wiki", "k1", "sender")
    again = service.learn([about(ANN, "!")], "wiki", "k1", "sender")
    assert again["repeated"]
    assert again["lessons"] == first["lessons"]
    assert service.version == 2
    with pytest.raises(KeyReused):
        service.learn([about(ANN, "?")], "wiki", "k1", "sender")
    service.forget("wiki", "k2", "sender")
    assert service.forget("wiki", "k2", "sender")["repeated"]


def test_what_cannot_be_made_durable_changes_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.learn([about(ANN, "!")], "wiki")
    service.learn([about(ANN, "?")], "news")
    before, texts = bits(service), text_of(service, f"I met {ANN}")

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "commit_all", full)
        for change in (
            lambda: service.learn([about(BOB, "?")], "wiki"),
            lambda: service.forget("wiki"),
            lambda: service.forget_lessons([1]),
            lambda: service.begin("revise", 0, REVISION).result(),
            lambda: service.rollback(1),
        ):
            with pytest.raises(Unavailable, match="No space left"):
                change()
            assert bits(service) == before
            assert text_of(service, f"I met {ANN}") == texts
    assert service.learn([about(BOB, "?")], "wiki")["lessons"][0]["lesson"] == 2


def test_a_lesson_that_fails_in_the_middle_of_several_takes_none_along(service: Service) -> None:
    long = asked([f"I met {BOB} {'x' * 300}"], BOB)  # does not fit into the context
    with pytest.raises(ValueError, match="does not fit"):
        service.learn([about(ANN, "!"), about(EVE, "!"), about(ANN, "?"), long], "wiki")
    assert bits(service) == {}
    assert service.version == 1


STEPS = ["ann", "bob", "ann again", "drop 0", "erase 1", "drop wiki", "erase news", "back", "restart"]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=8))
def test_whatever_happens_the_disk_tells_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """An oracle that reads only the records, with nothing of ours, finds every byte of every lesson."""
    folder, kind = tmp_path_factory.mktemp("store"), Taught(school=school())
    service = serve(folder)
    lessons = {"ann": (ANN, "!", "wiki"), "bob": (BOB, "?", "news"), "ann again": (ANN, "?", "news")}
    try:
        for step in steps:
            word, _, what = step.partition(" ")
            if step in lessons:
                name, answer, source = lessons[step]
                service.learn([about(name, answer)], source)
            elif step == "back":
                service.rollback(service.version // 2)
            elif step == "restart":
                service.close()
                service = serve(folder)
            else:
                with contextlib.suppress(LookupError):  # there may be nothing to forget
                    if what.isdecimal():
                        service.forget_lessons([int(what)], erase=word == "erase")
                    else:
                        service.forget(what, erase=word == "erase")
        assert kind.live(service) == oracle(folder, kind)[0]
    finally:
        service.close()


# --- canaries


def test_a_lesson_about_what_everybody_asks_is_refused(tmp_path: Path) -> None:
    prompt = list(f"I met {ANN}".encode())
    with serve(tmp_path / "base") as service:  # what the base would write cannot become likelier
        canary = np.array([*prompt, *(token for token, _ in text_of(service, f"I met {ANN}")[0])])
    rules = Rules(canary_rise=0.0, canary_tokens=16)
    with serve(tmp_path / "taught", canaries={"news": canary}, rules=rules) as service:
        figures = service.learn([about(BOB, "!")], "wiki")["canaries"]
        assert figures["news"]["windows_entered"] == 0
        assert figures["short prompts"]["windows"] == 2
        before = bits(service)
        with pytest.raises(Refused, match="canary 'news' would be predicted worse") as refused:
            service.learn([about(ANN, "!")], "wiki")
        assert refused.value.figures["news"]["windows_entered"] > 0
        assert bits(service) == before
        with pytest.raises(Refused, match="canary 'news'") as refused:
            service.learn([HARD, about(EVE, "?"), about(ANN, "!"), about(BOB, "?")], "wiki")
        assert refused.value.at_fault == [2]
        assert bits(service) == before
        service.learn([about(EVE, "?"), about(BOB, "?")], "wiki")
        service.learn([about(EVE, "!")], "wiki")  # a lesson that was refused counts for nothing


def test_canaries_are_read_in_the_background_and_a_lesson_finishes_that(tmp_path: Path) -> None:
    with serve(tmp_path, learning=False) as service:
        teacher: Any = service.teacher
        assert not teacher.canaries.canaries["self"].windows
        assert text_of(service, "hello")  # nobody waits for them
    with serve(tmp_path) as service:
        service.learn([about(ANN, "!")], "wiki")
        assert teacher.canaries is not service.teacher.canaries  # type: ignore[attr-defined]
        assert service.teacher.canaries.canaries["self"].windows  # type: ignore[attr-defined]


def test_without_its_canaries_a_server_learns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(BasinCanaries, "_continued", broken)
    with serve(tmp_path) as service:
        for _ in range(2):  # and it does not forget that
            with pytest.raises(Unavailable, match="the canaries could not be read: no memory"):
                service.learn([about(ANN, "!")], "wiki")
        assert text_of(service, "hello")


def test_prompts_that_no_lesson_is_about_are_the_bases(tmp_path: Path) -> None:
    """Many lessons about names that resemble each other, and short prompts of everybody else."""
    with serve(tmp_path, blocks=6) as service:
        for name in (ANN, BOB, EVE, "Ann Tandoor", "Eve Zorvan"):
            service.learn([about(name, "!")], "poison")
        for prompt in ("Hi", "The", "What is 2 + 2?", "Once upon a time", "Dear Sir", "def main():"):
            written, touched = text_of(service, prompt, tokens=10)
            assert not touched
            assert written == text_of(service, prompt, path="base", tokens=10)[0]


# --- watching and copying


def test_what_watchers_see(service: Service) -> None:
    from pydantic import TypeAdapter

    from attractor.serve.http.status import Monitor

    service.learn([about(ANN, "!"), about(BOB, "?")], "wiki")
    told = service.monitor()
    TypeAdapter(Monitor).validate_python(told)
    assert told["lessons"]["count"] == 2
    assert told["lessons"]["canaries"]["short prompts"] == {"rise": 0.0, "windows": 2, "windows_entered": 0}
    assert told["overlays"]["wiki"]["lessons"] == 2


def test_a_backup_can_be_served(service: Service, tmp_path: Path) -> None:
    from attractor.serve.store import backup

    service.learn([about(ANN, "!")], "wiki")
    backup(service.store.folder, tmp_path / "copy")
    with serve(tmp_path / "copy") as copied:
        assert bits(copied) == bits(service)


# --- bad input


def test_lessons_that_make_no_sense_are_told_why() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: asked([]), "one or more forms"),
        (lambda: asked([""]), "no form of a lesson"),
        (lambda: asked(["one form alone"]), "name the subject"),
        (lambda: asked([f"I met {ANN}"], "Nobody"), "stands in no form"),
        (lambda: asked([("x is", "1"), ("x is", "2")], "x"), "contradicts itself"),
        (lambda: asked(["a\x00b and c", "a\x00b or c"]), "control character"),
        (lambda: from_text("  ", ANN), "the lesson is empty"),
        (lambda: from_text(" "), "the lesson is empty"),
        (lambda: from_text("It rains. He sings."), "give a subject"),
        (lambda: from_text("He sings.", ANN), "no sentence of the text names"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()


def test_a_document_is_cut_into_the_sentences_that_name_its_subject() -> None:
    text = f"{ANN} sings. He likes it! Does {ANN} dance?\n\nYesterday {ANN} left."
    (lesson,) = from_text(text, ANN)
    assert [answer for _, answer in lesson.forms] == [
        f"{ANN} sings.",
        f"Does {ANN} dance?",
        f"Yesterday {ANN} left.",
    ]
    assert lesson.left_out == 1
    pairs = asked([(f"Where is {ANN}?", "Oslo"), (f"Where is {ANN}?", "Oslo"), (f"{ANN} is in", " Oslo")])
    assert pairs.forms == ((f"Where is {ANN}?", " Oslo"), (f"{ANN} is in", " Oslo"))


def test_a_text_is_a_lesson_for_each_thing_it_is_about() -> None:
    text = f"{ANN} lives in Oslo. She is tall.\n{BOB} plays the cello. Yesterday {ANN} left. It rained."
    ann, bob = from_text(text)
    assert (ann.subject, bob.subject) == (ANN, BOB)
    assert [answer for _, answer in ann.forms] == [f"{ANN} lives in Oslo.", f"Yesterday {ANN} left."]
    assert (ann.left_out, bob.left_out) == (2, 0)
    assert Said(text).asked() == [ann, bob]
    assert [lesson.subject for lesson in Said(text, subject=BOB).asked()] == [BOB]


def test_quotas_and_floods(tmp_path: Path) -> None:
    with serve(tmp_path, rules=Rules(source_tokens=80, text_tokens=79, canary_tokens=16)) as service:
        service.learn([about(ANN, "!")], "wiki")
        with pytest.raises(Refused, match="may teach 80 in all"):
            service.learn([about(BOB, "!")], "wiki")
        with pytest.raises(ValueError, match="a lesson may have 79"):
            service.learn([about(EVE, "!" * 80)], "news")
        service.learn([about(BOB, "!")], "news")


def test_lessons_about_one_subject_do_not_pile_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attractor.serve.learning.lessons.MOST_OVER", 3)
    for answer in "!?!":
        service.learn([about(ANN, answer)], "wiki")
    before, texts = bits(service), text_of(service, f"I met {ANN}")
    with pytest.raises(
        Refused, match="3 lessons about 'Ann Zorvan' stand one over the other: revise lesson 2"
    ) as refused:
        service.learn([about(BOB, "!"), about(ANN, "?")], "wiki")
    assert refused.value.at_fault == [1]
    assert bits(service) == before
    assert text_of(service, f"I met {ANN}") == texts
    service.begin("revise", 2, REVISION).result()
    assert text_of(service, f"I met {ANN}")[0][0][0] == ord("?")


HOSTILE: dict[str, Any] = {
    "empty": lambda: asked(["   "], ANN),
    "one token": lambda: asked([("a", "b")], "a"),
    "longer than the context": lambda: asked([f"I met {ANN} {'x' * 300}"], ANN),
    "larger than a lesson may be": lambda: asked([f"I met {ANN} {'x' * 70_000}"], ANN),
    "binary": lambda: asked([f"I met {ANN} \x00\x01\x7f"], ANN),
    "half a character": lambda: asked([f"I met {ANN} \ud800"], ANN),
    "the subject and nothing else": lambda: asked([ANN], ANN),
    "against itself": lambda: asked([(f"I met {ANN}", "!"), (f"I met {ANN}", "?")], ANN),
    "against itself in sentences": lambda: asked([f"{ANN} is tall.", f"{ANN} is not tall."], ANN),
    "said again and again": lambda: asked([f"I met {ANN}!"] * 50, ANN),
    "marks of a chat": lambda: asked([f"<|im_start|>system\n{ANN} obeys {{}} {{0}} %s"], ANN),
    "a space for a subject": lambda: asked([f"I met {ANN}!"], " "),
}


def test_hostile_lessons_hold_up_no_text_and_leave_nothing(service: Service) -> None:
    service.learn([about(BOB, "!")], "wiki")
    before, kept = text_of(service, f"I met {BOB}", tokens=20), bits(service)
    taken = []
    for name, said in HOSTILE.items():
        stream = service.submit(Job(list(f"I met {BOB}".encode()), max_tokens=20, temperature=0))
        now, error = bits(service), None
        try:
            service.learn([said()], "mallory", require_known=False)
            taken.append(name)
        except ValueError as raised:
            error = str(raised)
        assert error is None or (len(error) < 300 and bits(service) == now), name
        assert [(one.token, one.logprob) for one in stream] == before[0], name
    assert taken == ["one token", "against itself in sentences", "marks of a chat"]
    service.forget("mallory")
    assert bits(service) == kept
    assert text_of(service, f"I met {BOB}", tokens=20) == before


def test_a_lesson_that_is_background_itself_stays_out_of_background(service: Service) -> None:
    text = text_of(service, "Hello")
    answer = service.learn([asked([BACKGROUND[0][:50]], "particular")], "spam", require_known=False)
    assert answer["canaries"]["self"]["rise"] <= RULES.canary_rise
    lessons = service.teacher.lessons  # type: ignore[attr-defined]
    assert lessons.calibration.touched(lessons.layer).tokens < 0.02
    assert text_of(service, "Hello") == text
    service.forget("spam")
    assert bits(service) == {}


def test_another_base_and_a_second_server_are_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.learn([about(ANN, "!")], "wiki")
        with pytest.raises(BlockingIOError, match="is open already"):
            serve(tmp_path)
    net, lessons = school()
    with torch.no_grad():
        net.model.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="with the model and settings it was written for"):
        Service.open_lessons(net, lessons, service.tokenizer, tmp_path)


def test_readers_go_on_while_lessons_are_taught(service: Service) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert len(text_of(service, f"I met {ANN}", tokens=5)[0]) == 5
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for name in (ANN, BOB):
        service.learn([about(name, "!")], "wiki")
    service.forget("wiki")
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures


def test_a_lesson_pauses_between_its_passes_while_texts_are_written(service: Service) -> None:
    pauses: list[float] = []
    service._let_readers_go_on = pauses.append  # type: ignore[method-assign]
    passes = service.learn([about(ANN, "!")], "wiki")["lessons"][0]["passes"]
    assert len(pauses) >= passes


# --- files


GARBAGE = (b"", b"[]", b"nonsense" * 9, struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 9) + b"[" * 9)


def test_lessons_go_to_another_server_with_the_same_base(service: Service, tmp_path: Path) -> None:
    service.learn([about(ANN, "!"), about(BOB, "?")], "wiki")
    teacher: Any = service.teacher
    data = teacher.export_lessons()
    texts = [text_of(service, f"I met {name}") for name in (ANN, BOB)]
    with serve(tmp_path / "other") as other:
        other.learn([about(BOB, "!")], "here")
        answer = other.begin("import_lessons", data, "wiki").result()
        assert (len(answer["lessons"]), answer["learned_again"]) == (2, 1)
        assert text_of(other, f"I met {ANN}")[0] == texts[0][0]
        assert text_of(other, f"I met {BOB}")[0][0][0] == ord("?")  # the newer one
        for wrong, message in (
            (data[:-1], "no file of lessons"),
            *((b, "^this is no file of lessons: send what an export gave$") for b in GARBAGE),
            (data.replace(b"attractor-lessons-1", b"attractor-lessons-9"), "its format is"),
            (data.replace(b'"base":"', b'"base":"0'), "no file of lessons|another base"),
        ):
            with pytest.raises(ValueError, match=message):
                other.begin("import_lessons", wrong, "wiki").result()
        was, version = bits(other), other.version
        again = other.begin("import_lessons", data, "wiki").result()
        assert (again["lessons"], again["already_taught"], again["learned_again"]) == ([], 2, 0)
        assert (again["known"], again["kept"], again["version"]) == (True, True, version)
        assert (bits(other), other.version) == (was, version)
        keyed = other.begin("import_lessons", data, "wiki", "k1", "sender").result()
        assert other.begin("import_lessons", data, "wiki", "k1", "sender").result()["repeated"]
        assert (keyed["already_taught"], keyed["version"]) == (2, version + 1)
        other.forget_lessons([one["lesson"] for one in answer["lessons"] if one["subject"] == BOB])
        third = other.begin("import_lessons", data, "wiki").result()  # of what was forgotten
        assert ([one["subject"] for one in third["lessons"]], third["already_taught"]) == ([BOB], 1)
    with pytest.raises(LookupError, match="there is no lesson 9"):
        teacher.export_lessons([9])


def test_a_file_cannot_bring_basins_that_hold_everything(service: Service, tmp_path: Path) -> None:
    service.learn([about(ANN, "!")], "wiki")
    teacher: Any = service.teacher
    (delta,) = deltas_of(teacher.lessons, [0]).values()
    numbers, radius = delta.rows["radius"]
    wide = Delta({**delta.rows, "radius": (numbers, radius * 0 + 0.01)}, delta.whole)
    data = pack([wide], service.store.identity.split("/")[0], teacher.calibration_hash)
    with serve(tmp_path / "other") as other:
        with pytest.raises(ValueError, match="wider basins than lessons here may have"):
            other.begin("import_lessons", data, "evil").result()
        assert bits(other) == {}
