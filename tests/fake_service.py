"""A service without a model: what it writes, learns and answers is simple enough to know beforehand.

    service = FakeService(); app = create_app(service, ServeSettings())
    PYTHONPATH=. python tests/fake_service.py 8000            # to look at the dashboard
    PYTHONPATH=. python tests/fake_service.py 8000 lessons    # to look at that of lessons

Every token is the next letter of a line that depends on the prompt's last token, the seed and the path.
"""

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from attractor.continual.lessons import Lesson
from attractor.serve.decode.engine import Job
from attractor.serve.decode.sequences import GeneratedToken, Touch
from attractor.serve.errors import Busy, Refused, Unavailable
from attractor.serve.http.status import Monitor
from attractor.serve.learning.catalogue import Asked, Catalogue, figures_of_none, searched
from attractor.tokenizer import ByteTokenizer

LINE = "Now is the winter of our discontent\nMade glorious summer by this sun of York. "


class FakeStream:
    """Tokens from a plan, handed out on the event loop; slow where `delay` is set."""

    def __init__(
        self, version: int, plan: list[GeneratedToken], reason: str, delay: float, message: str | None
    ) -> None:
        self._version, self._plan, self._reason, self._delay = version, plan, reason, delay
        self.version: int | None = None  # known when it is admitted
        self.finish: str | None = None
        self.message: str | None = None
        self.touched: tuple[Touch, ...] = ()
        self._failure = message
        self._cancelled = asyncio.Event()
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        self.version = self._version
        for token in self._plan:
            if self._delay:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._cancelled.wait(), self._delay)
            if self.cancelled:
                self.finish = "cancelled"
                return
            yield token
        self.finish, self.message = self._reason, self._failure

    def cancel(self) -> None:
        self.cancelled = True
        self._cancelled.set()


class FakeService:
    name, context, vocab_size, learning = "fake", 64, 256, True
    teaches = "texts"
    stop_tokens = frozenset[int]()

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.writer = ThreadPoolExecutor(1)
        self.version = 0
        self.sources: dict[str, int] = {}  # source -> tokens it saw
        self.history: list[dict[str, Any]] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.states: dict[int, dict[str, int]] = {0: {}}
        self.jobs: list[Job] = []
        self.tickets: list[FakeStream] = []
        self.posteriors: list[Any] = []
        self.started = time.time()
        self.delay = 0.0
        self.text = LINE
        self.problem: Exception | None = None  # raised by the next calls
        self.failure: str | None = None  # of generations
        self.is_ready = (True, "")
        self.held: threading.Event | None = None  # lessons wait for it
        self.learners = 0  # that did

    # --- generating

    def paths(self) -> list[str]:
        return ["base", *self.sources]

    def submit(self, job: Job, pin: object = None) -> FakeStream:
        if self.problem is not None:
            raise self.problem
        assert job.path is None or job.path in self.paths()
        assert 0 < len(job.prompt) <= self.context
        assert all(0 <= token < self.vocab_size for token in job.prompt)
        start = (0 if job.seed is None else job.seed) + (0 if job.path is None else len(job.path))
        letters = self.text.encode()
        plan = [
            GeneratedToken(letters[(start + i) % len(letters)], -0.5, self._shares(job, i))
            for i in range(job.max_tokens)
        ]
        reason = "error" if self.failure else "length"
        stream = FakeStream(self.version, plan, reason, self.delay, self.failure)
        self.jobs.append(job)
        self.tickets.append(stream)
        posterior = {"at": time.time(), "version": self.version, "shares": self._shares(job, job.max_tokens)}
        self.posteriors = [*self.posteriors, posterior][-60:]
        return stream

    def _shares(self, job: Job, position: int) -> dict[str, float]:
        if job.path is not None:
            return {job.path: 1.0}
        weights = [1.2 + math.sin(position / 7 + 2 * number) for number in range(len(self.paths()))]
        return {path: weight / sum(weights) for path, weight in zip(self.paths(), weights, strict=True)}

    # --- learning

    def begin(self, verb: str, *arguments: Any, **options: Any) -> Future[dict[str, Any]]:
        return self.writer.submit(getattr(self, verb), *arguments, **options)

    def _change(self, kind: str, key: str | None, answer: dict[str, Any], **line: Any) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        self.version += 1
        answer = {"version": self.version, **answer}
        self.states[self.version] = dict(self.sources)
        self.history.append(
            {"version": self.version, "kind": kind, "at": f"2026-01-01T00:00:{self.version % 60:02}Z", **line}
        )
        if key is not None:
            self.answers[key] = answer
        return answer

    def learn(
        self, texts: list[str], source: str, key: str | None, sender: str | None = None
    ) -> dict[str, Any]:
        if self.held is not None:
            self.learners += 1
            self.held.wait(300)
        if key in self.answers:
            return self.answers[key] | {"repeated": True}
        if self.problem is not None:
            raise self.problem
        if source == "base" or not any(texts):
            raise ValueError("'base' cannot name an overlay, and a lesson needs a text")
        tokens = sum(len(self.tokenizer.encode(text)) for text in texts)
        self.sources[source] = self.sources.get(source, 0) + tokens
        loss = 1.6 + 2 * math.exp(-self.version / 20) + 0.15 * math.sin(self.version)
        answer = {
            "source": source,
            "loss": loss,
            "tokens": tokens,
            "taught": tokens - 1,
            "held_back": {},
            "patches": {"0": [1, 5]},
            "bytes": 512,
            "repeated": False,
        }
        return self._change("lesson", key, answer, source=source, loss=loss, tokens=tokens)

    def versions(self, limit: int, before: int | None) -> list[dict[str, Any]]:
        lines = [line for line in reversed(self.history) if before is None or line["version"] < before]
        return lines[:limit]

    def rollback(self, version: int, key: str | None = None, sender: str | None = None) -> dict[str, Any]:
        if key in self.answers:
            return self.answers[key]
        if version not in self.states:
            raise ValueError(f"there is no version {version}: 0 to {self.version}")
        if self.problem is None:
            self.sources = dict(self.states[version])
        return self._change("rollback", key, {"to": version}, to=version)

    def forget(
        self, source: str, key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        if key in self.answers:
            return self.answers[key]
        if source not in self.sources:
            raise LookupError(f"there is no source {source!r}")
        if self.problem is None:
            del self.sources[source]
        return self._change("drop", key, {"source": source}, source=source)

    def state(self) -> tuple[Any, ...]:
        """Everything that a request may change."""
        return self.version, tuple(self.sources.items()), len(self.history), tuple(self.answers)

    # --- looking

    def overlays(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "version": self.version,
                "tokens": tokens,
                "bytes": 300 * tokens,
                "patches": {"0": 12, "1": 9},
            }
            for name, tokens in self.sources.items()
        }

    def ready(self) -> tuple[bool, str]:
        return self.is_ready

    def monitor(self) -> Monitor:
        lessons = [line for line in self.history if line["kind"] == "lesson"]
        counts = {
            str(layer): [
                float(int(40 * (1.1 + math.sin(patch * (layer + 2) / 5)) ** 2)) for patch in range(32)
            ]
            for layer in range(4)
        }
        return {
            "version": self.version,
            "uptime": time.time() - self.started,
            "learning": self.learning,
            "progressive": [{k: line.get(k) for k in ("version", "loss", "source")} for line in lessons],  # type: ignore[typeddict-item]
            "canaries": {
                name: [
                    {"version": number, "perplexity": base + 0.03 * math.sin(number * speed)}
                    for number in (line["version"] for line in lessons)
                ]
                for name, base, speed in (("shakespeare", 4.1, 0.3), ("news", 4.6, 0.2))
                if lessons
            },
            "usage": {
                layer: {"entropy": _entropy(values), "counts": values}
                for layer, values in counts.items()
                if lessons
            },
            "overlays": self.overlays(),  # type: ignore[typeddict-item]
            "lessons": None,
            "posteriors": self.posteriors,
            "queue": {"generating": 2, "waiting": 1, "learning": 3, "limit": 64},
            "tokens_per_second": 117.4,
            "journal": {
                "last": self.version,
                "bytes": 1000 * self.version,
                "recovered": None,
                "shared": False,
                "behind": None,
            },
            "drift": {
                name: {"used": 0.004 * number + 0.002, "budget": 0.02}
                for number, name in enumerate(self.sources)
            },
        }


UNKNOWN = "Unlearnable"
"""A fake school does not know what it is taught about this."""


class FakeSchool(FakeService):
    """It is taught lessons: an answer to a question that names a subject is what the lesson says of it."""

    teaches = "lessons"

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()

    def teach(self, subject: str, answer: str, source: str = "people", known: float = 1.0) -> None:
        number = self.version
        forms = ((f"The home of {subject} is", answer), (f"{subject} lives in", answer))
        lesson = Lesson(number, subject, forms, (), 3, 0, 8, known_before=0.0, known=known)
        self._change("lesson", None, {}, source=source, lesson=number)
        fields = {"tokens": 0, "bytes": 18_000 + 700 * number, "at": self.history[-1]["at"]}
        self.catalogue.add(lesson, source, fields, self.version)

    def learn(  # type: ignore[override]
        self, what: list[Asked], source: str, key: str | None, sender: str | None = None, **_: Any
    ) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        lessons = []
        for each in what:
            if UNKNOWN in each.subject:
                lesson = Lesson(-1, each.subject, each.forms, (), 3, 0, 24, known_before=0.0, known=0.0)
                told = figures_of_none(lesson, {"bytes": 0})
                lessons.append({**told, "kept": False, "subject": each.subject})
                continue
            number = self.version
            self.teach(each.subject, each.forms[0][1], source)
            lessons.append({**self.catalogue.entries[number], "kept": True})
        answer = {"version": self.version, "source": source, "repeated": False, "now": self.version}
        said = {name: all(one[name] for one in lessons) for name in ("known", "kept")}
        return {**answer, "lessons": lessons, **said}

    def paths(self) -> list[str]:
        return ["base", "lessons"]

    def submit(self, job: Job, pin: object = None) -> FakeStream:
        prompt = self.tokenizer.decode(job.prompt)
        named = [entry for entry in self.lessons() if entry["subject"] in prompt and job.path != "base"]
        plan, shares = list[GeneratedToken](), {job.path or "lessons": 1.0}

        def write(text: str, lesson: int | None = None) -> None:
            for letter in text.encode():
                touch = () if lesson is None else (Touch(len(job.prompt) + len(plan), lesson, 0.75),)
                plan.append(GeneratedToken(letter, -0.5, shares, touch))

        for entry in named:
            write(" and in " if plan else " In ")
            write(entry["forms"][0][1], entry["lesson"])
        write("." if named else " I do not know.")
        stream = FakeStream(self.version, plan, "stop", self.delay, self.failure)
        stream.touched = tuple(
            Touch(prompt.index(entry["subject"]) + letter, entry["lesson"], 0.98)
            for entry in named
            for letter in range(len(entry["subject"]))
        )
        return stream

    def lessons(self, **which: Any) -> list[dict[str, Any]]:
        return searched(self.catalogue.entries, **which)

    def lesson(self, number: int) -> dict[str, Any] | None:
        return self.catalogue.entries.get(number)

    def forget_lessons(
        self, numbers: list[int], key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        for number in numbers:
            if number not in self.catalogue.entries:
                raise LookupError(f"there is no lesson {number}")
        answer = self._change("drop", key, {"erased": erase}, lesson=numbers[0], source="people")
        for number in numbers:
            self.catalogue.remove(number)
        return answer

    def overlays(self) -> dict[str, dict[str, Any]]:
        told = self.catalogue.sources
        return {name: {**own, "patches": {"4": own["patches"]}} for name, own in told.items()}

    def monitor(self) -> Monitor:
        entries = self.lessons()
        return {
            **super().monitor(),
            "progressive": [],
            "canaries": {},
            "usage": {},
            "drift": {},
            "posteriors": [],
            "lessons": {
                "count": len(entries),
                "known": sum(entry["known"] for entry in entries),
                "sources": len(self.catalogue.sources),
                "patches": sum(entry["patches"] for entry in entries),
                "bytes": sum(entry["bytes"] for entry in entries),
                "canaries": {
                    "manual": {"rise": 0.0004, "windows": 64, "windows_entered": 1},
                    "short prompts": {"rise": 0.0, "windows": 32, "windows_entered": 0},
                },
            },
        }


def school(lessons: int = 14) -> FakeSchool:
    """A service that was taught some lessons, one of which it does not know."""
    service = FakeSchool()
    people = ("Zorvan Quillbeam", "Ann Holt", "Mira Okonkwo-Castellanos", "Bo Lund", "Yusuf Tarn")
    towns = ("Lisbon", "Bergen", "San Carlos de Bariloche", "Oulu", "Izmir")
    for number in range(lessons):
        name = people[number] if number < len(people) else f"Person {number}"
        service.teach(name, towns[number % 5], ("people", "wiki-2026")[number % 2], 0.5 if number == 3 else 1)
    return service


def _entropy(counts: list[float]) -> float:
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts if count)


BUSY = Busy("too many lessons wait", 2.5)
REFUSED = Refused("a canary got worse", {"canary": "news", "before": 4.6, "after": 5.2}, [2])
UNAVAILABLE = Unavailable("the disk is full: [Errno 28] No space left on device: '/srv/data/journal'")


def filled(lessons: int = 60) -> FakeService:
    """A service with something to look at."""
    service = FakeService()
    for number in range(lessons):
        service.learn(["some text " * (number + 1)], ("kjv", "news-2026", "support")[number // 5 % 3], None)
    if lessons:
        service.rollback(lessons - 4)
    for seed in range(40 if lessons else 0):
        service.submit(Job(prompt=[65], max_tokens=seed + 1))
        service.posteriors[-1]["at"] -= 10 * (40 - seed)
    return service


if __name__ == "__main__":
    import uvicorn

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app, uvicorn_config

    settings = ServeSettings(port=int(sys.argv[1]), keys=sys.argv[3] if len(sys.argv) > 3 else None)
    what = sys.argv[2] if len(sys.argv) > 2 else "60"
    shown = school() if what == "lessons" else filled(int(what))
    shown.delay = 0.01
    uvicorn.Server(uvicorn_config(create_app(shown, settings), settings)).run()
