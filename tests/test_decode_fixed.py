"""Passes of fixed shapes write what other passes write. On a GPU they are recorded as CUDA graphs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from taught import about, serve, text_of

from attractor.serve.decode.engine import Job
from attractor.serve.learning import readers
from attractor.serve.service import Service

ANN, BOB = "Ann Zorvan", "Bob Quillbeam"
LONG = "a text that is longer than the shortest pass, and goes on for a while, " * 4


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same server with passes as they come, and with passes of fixed shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attractor.serve.learning.canaries.PROMPTS", ("Hello", "The capital of"))
        with serve(tmp_path_factory.mktemp("plain")) as plain:
            patch.setattr(readers.Readers, "fixed", True)
            with serve(tmp_path_factory.mktemp("fixed")) as fixed:
                for service in (plain, fixed):
                    service.learn([about(ANN, "!")], "wiki")
                yield plain, fixed


def pool_of(service: Service) -> readers.Pool:
    pool = service.teacher.readers.pool  # type: ignore[attr-defined]
    assert pool is not None
    return pool


def near(ours: Any, theirs: Any) -> None:
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)


@pytest.mark.parametrize("path", [None, "base"])
@pytest.mark.parametrize("prompt", [f"I met {ANN}", "Hello", LONG])
def test_a_text_is_the_same(both: Any, prompt: str, path: str | None) -> None:
    """Also past the end of the context, where half of it is read again."""
    (theirs, expected), (ours, touched) = (text_of(service, prompt, path, tokens=30) for service in both)
    near(ours, theirs)
    assert touched == expected
    assert touched or path or ANN not in prompt


def test_texts_of_several_lengths_come_and_go(both: Any) -> None:
    """Rows move when others leave, memory grows, and texts of two versions are read in one pass."""
    written = []
    for service in both:
        jobs = [
            Job(list((f"{n} and {ANN} " * (1 + n % 4)).encode()), max_tokens=5 + 3 * n, temperature=0)
            for n in range(8)
        ]
        streams = [service.submit(job) for job in jobs[:4]]
        streams[0].next(timeout=10)
        service.learn([about(BOB, "?")], "wiki")
        streams += [service.submit(job) for job in jobs[4:]]
        written.append([[(one.token, one.logprob) for one in stream] for stream in streams])
        assert {stream.finish for stream in streams} == {"length"}
    for theirs, ours in zip(*written, strict=True):
        near(ours[-len(theirs) :], theirs)


def test_untouched_is_the_base_to_the_bit(both: Any) -> None:
    service = both[1]
    for prompt in ("Hello", "Somebody met nobody"):
        written, touched = text_of(service, prompt, tokens=20)
        assert not touched
        assert written == text_of(service, prompt, "base", tokens=20)[0]


def test_memory_is_used_again_and_a_bank_of_another_size_gets_its_own(both: Any) -> None:
    service = both[1]
    pool = pool_of(service)
    for _ in range(2):
        text_of(service, "Hello")
    (passes,) = pool._for_rows
    assert passes.is_free
    service.learn([about(f"{BOB} {number}", "?") for number in range(6)], "wiki")  # the bank grows
    near(text_of(service, f"I met {ANN}")[0], text_of(both[0], f"I met {ANN}")[0])
    assert [one.patches.count for one in pool._for_rows if one.patches] == [
        service.teacher.lessons.layer.num_patches  # type: ignore[attr-defined]
    ]


def test_nothing_of_a_text_that_broke_stays_in_its_place(both: Any) -> None:
    service = both[1]
    before = text_of(service, "Hello", tokens=20)
    for passes in (*pool_of(service)._for_rows, pool_of(service)._for_prompts):
        assert passes is not None
        passes.memory.fill_(torch.nan)  # type: ignore[union-attr]
    assert text_of(service, "Hello", tokens=20) == before


def test_a_model_that_takes_no_such_pass_is_read_as_before(
    both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readers.Readers, "fixed", True)
    monkeypatch.setattr("attractor.serve.decode.fixed.NEAR", -1.0)
    with serve(tmp_path / "other") as service, caplog.at_level(logging.WARNING):
        near(text_of(service, "Hello", "base")[0], text_of(both[0], "Hello", "base")[0])
        text_of(service, "Hello")
        assert not pool_of(service).works
    assert "it predicts something else" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recorded_passes_write_the_same(tmp_path: Path) -> None:
    found = []
    for recorded in (False, True):
        with serve(tmp_path / str(recorded), device="cuda") as service:
            teacher: Any = service.teacher
            if not recorded:
                teacher.readers.pool = teacher.readers.base.pool = None
            service.learn([about(ANN, "!")], "wiki")
            prompts = (f"I met {ANN}", "Hello", LONG)
            found.append(
                [text_of(service, one, path, tokens=40) for one in prompts for path in (None, "base")]
            )
            if recorded:
                passes = pool_of(service)._for_rows[0]._passes
                assert passes
                assert all(one.graph is not None for one in passes.values())
    for (theirs, expected), (ours, touched) in zip(*found, strict=True):
        near(ours, theirs)
        assert touched == expected
