"""One thread writes all texts: it reads prompts, gives every row its next token, and hands the tokens out.

engine = Engine(publication)
ticket = engine.submit(Job(prompt=[1, 2, 3], max_tokens=20, seed=0))
for written in ticket: ...               # or: async for written in ticket
ticket.finish, ticket.version
engine.publish(newer)                    # for the jobs that start from now on
engine.close(drain_s=10)
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from attractor.config import check_number, check_size
from attractor.generate import check_settings
from attractor.serve.decode.batch import Desk
from attractor.serve.decode.sequences import PIECE, Draw, Publication, Row, Written, read
from attractor.serve.decode.stream import Finish, Outlet, Ticket
from attractor.serve.errors import Busy

__all__ = ["Engine", "Job", "Pin", "Publication", "Ticket", "Written"]

log = logging.getLogger("attractor")

RECENT_S = 10.0  # what "tokens per second" looks back on


@dataclass(frozen=True)
class Job:
    """A text to write. A token in `stop_tokens` ends it, and is not handed out."""

    prompt: Sequence[int]
    max_tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    path: str | None = None  # None: the mixture of all paths
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_settings(self.max_tokens, self.temperature, self.top_k, self.top_p)
        if not len(self.prompt):
            raise ValueError("the prompt is empty: it must have at least one token")
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**64):
            raise ValueError(f"seed={self.seed!r} must be an integer of 64 bits")


class Pin:
    """Jobs that share one are written with the same version: that of the first of them to start."""

    publication: Publication | None = None


@dataclass(eq=False)
class Task:
    """A job on its way through the engine."""

    job: Job
    outlet: Outlet
    pin: Pin
    since: float = 0.0  # when it was admitted
    row: Row | None = None
    reading: Iterator[None] | None = None
    written: int = 0


class Engine:
    def __init__(
        self,
        publication: Publication,
        *,
        max_rows: int = 64,
        max_waiting: int = 256,
        threads: int | None = None,
    ) -> None:
        """`threads` are torch's, for the thread that writes (default: as many as torch takes)."""
        check_size("max_rows", max_rows)
        check_size("max_waiting", max_waiting)
        self.max_rows, self.max_waiting, self.threads = max_rows, max_waiting, threads
        self.publication = publication
        self._changed = threading.Condition()  # guards the publication, what waits, and the figures
        self._waiting: deque[Task] = deque()
        self._closing_at: float | None = None
        self._figures: dict[str, Any] = {"rows": 0, "versions": {}}
        self._tokens: deque[tuple[float, int]] = deque()  # when, and how many
        self._recent: deque[dict[str, Any]] = deque(maxlen=32)
        self._seconds_per_job = 1.0
        self._since = time.monotonic()
        # what follows belongs to the thread
        self._desk = Desk(publication.device)
        self._to_read: deque[Task] = deque()  # the first of them is reading
        self._tasks: dict[Row, Task] = {}
        self._thread = threading.Thread(target=self._run, name="attractor-engine", daemon=True)
        self._thread.start()

    # --- for any thread

    def publish(self, publication: Publication) -> None:
        """Jobs that start from now on are written with this; those that started go on as they began."""
        now = self.publication
        if (publication.vocab_size, publication.device) != (now.vocab_size, now.device):
            raise ValueError(
                f"version {publication.version} has {publication.vocab_size} tokens on {publication.device}, "
                f"what is served {now.vocab_size} on {now.device}: start another engine"
            )
        with self._changed:
            self.publication = publication

    def submit(self, job: Job, pin: Pin | None = None) -> Ticket:
        """Raises Busy when too many wait, ValueError for a job that cannot be written."""
        self._check(job)
        with self._changed:
            if self._closing_at is not None:
                raise Busy("the engine is closing", retry_after=5.0)
            if len(self._waiting) >= self.max_waiting:
                wait = self._seconds_per_job * len(self._waiting) / self.max_rows
                raise Busy(f"{len(self._waiting)} jobs wait already", retry_after=min(max(wait, 1.0), 60.0))
            outlet = Outlet()
            self._waiting.append(Task(job, outlet, pin or Pin()))
            self._changed.notify_all()
        return Ticket(outlet)

    def _check(self, job: Job) -> None:
        names, size = self.publication.guard.names, self.publication.vocab_size
        if job.path is not None and job.path not in names:
            raise ValueError(f"there is no path {job.path!r}; there are {names}")
        for token in job.prompt:
            if type(token) is not int or not 0 <= token < size:
                raise ValueError(
                    f"the prompt has the token {token!r}: expected integers from 0 to {size - 1}"
                )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        with self._changed:
            now = time.monotonic()
            count = sum(tokens for at, tokens in self._tokens if at > now - RECENT_S)
            seconds = min(RECENT_S, max(now - self._since, 0.1))
            return {
                **self._figures, "waiting": len(self._waiting), "tokens_per_second": count / seconds,
                "version": self.publication.version, "recent": list(self._recent),
            }  # fmt: skip

    def close(self, drain_s: float = 10.0) -> None:
        """No new jobs; those that are there get `drain_s` seconds. Returns when the thread has ended."""
        check_number("drain_s", drain_s, "a number of seconds, 0 or more", lambda seconds: seconds >= 0)
        with self._changed:
            until = time.monotonic() + drain_s
            self._closing_at = until if self._closing_at is None else min(until, self._closing_at)
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)

    # --- the thread

    def _run(self) -> None:
        finish: Finish = "error"
        if self.threads is not None:
            torch.set_num_threads(self.threads)  # of this thread alone
        try:
            while self._has_work():
                self._turn()
            finish = "cancelled"
        finally:  # whatever happened, nobody waits for ever
            with self._changed:
                self._closing_at = self._closing_at or time.monotonic()
                left = [*self._waiting, *self._to_read, *self._tasks.values()]
                self._figures = {"rows": 0, "versions": {}}
                for tasks in (self._waiting, self._to_read, self._tasks):
                    tasks.clear()
            self._desk = Desk(self._desk.device)
            for task in left:
                task.outlet.end(finish, "the engine has ended")

    def _has_work(self) -> bool:
        """Sleeps until there is some; False when the engine is to end."""
        with self._changed:
            busy = bool(self._tasks or self._to_read)
            while not busy and not self._waiting and self._closing_at is None:
                self._changed.wait()
            if self._closing_at is None:
                return True
            return (busy or bool(self._waiting)) and time.monotonic() < self._closing_at

    def _turn(self) -> None:
        self._drop_cancelled()
        self._read_on()
        try:
            written, failed = self._desk.step()
        except Exception as error:  # nobody knows what it left behind
            log.exception("a step failed: its rows end")
            written, failed = [], dict.fromkeys(self._tasks, f"{type(error).__name__}: {error}")
            self._desk = Desk(self._desk.device)
        for row, reason in failed.items():
            self._end(self._tasks[row], "error", reason)
        self._hand_out(written)
        self._account(len(written))

    def _drop_cancelled(self) -> None:
        with self._changed:
            waiting = [task for task in self._waiting if task.outlet.cancelled]
            for task in waiting:
                self._waiting.remove(task)
        reading = [task for task in self._to_read if task.outlet.cancelled]
        for task in reading:
            self._to_read.remove(task)
        tasks = [task for task in self._tasks.values() if task.outlet.cancelled]
        for task in [*waiting, *reading, *tasks]:
            self._end(task, "cancelled", None)

    def _admit(self) -> None:
        """The next job starts, with what is published now."""
        with self._changed:
            if not self._waiting or len(self._tasks) + len(self._to_read) >= self.max_rows:
                return
            task = self._waiting.popleft()
            publication = task.pin.publication = task.pin.publication or self.publication
        job, task.since = task.job, time.monotonic()
        task.outlet.version = publication.version
        try:
            draw = Draw(job.temperature, job.top_k, job.top_p, job.seed)
            if job.path not in (None, *publication.guard.names):
                raise ValueError(f"the path {job.path!r} was dropped")
            task.row = Row(publication, job.prompt, draw, job.path)
        except Exception as error:
            self._end(task, "error", str(error))
        else:
            self._to_read.append(task)

    def _read_on(self) -> None:
        """Texts whose context was full, and one new prompt; a piece in all, so that nobody waits for long."""
        admitted, left = False, PIECE
        while left > 0:
            if not self._to_read:
                if admitted:
                    return
                admitted = True
                self._admit()
            if not self._to_read or not (tokens := self._read_first()):
                return
            left -= tokens

    def _read_first(self) -> int:
        """The tokens that were read, or 0 if there are more, which have to wait."""
        task = self._to_read[0]
        row = task.row
        assert row is not None
        try:
            task.reading = task.reading or read(row)
            if next(task.reading, self) is not self:
                return 0
        except Exception as error:
            log.warning("a prompt failed", exc_info=error)
            self._to_read.popleft()
            self._end(task, "error", f"{type(error).__name__}: {error}")
            return 1
        task.reading = None
        self._to_read.popleft()
        self._tasks[row] = task
        self._desk.join(row)
        return row.length * len(row.seats)

    def _hand_out(self, written: list[tuple[Row, Written]]) -> None:
        for row, one in written:
            task = self._tasks[row]
            if one.token in task.job.stop_tokens:
                self._end(task, "stop", None)
                continue
            task.written += 1
            task.outlet.put(one)
            if task.written >= task.job.max_tokens:
                self._end(task, "length", None)
            elif row.is_full:
                self._read_again(task, row)

    def _read_again(self, task: Task, row: Row) -> None:
        try:
            self._desk.set_aside(row)
        except Exception as error:
            self._end(task, "error", f"{type(error).__name__}: {error}")
        else:
            del self._tasks[row]
            self._to_read.append(task)

    def _end(self, task: Task, finish: Finish, message: str | None) -> None:
        row, now = task.row, time.monotonic()
        if row is not None and self._tasks.pop(row, None) is not None:
            if row in self._desk.rows:
                self._note(task, row, finish)
            self._desk.leave([row])
        if finish in ("stop", "length"):
            self._seconds_per_job += 0.1 * (now - task.since - self._seconds_per_job)
        task.outlet.end(finish, message)

    def _note(self, task: Task, row: Row, finish: Finish) -> None:
        seen = {
            "at": time.time(), "version": row.publication.version, "tokens": task.written, "finish": finish,
            "posterior": self._desk.posterior(row),
        }  # fmt: skip
        with self._changed:
            self._recent.append(seen)

    def _account(self, tokens: int) -> None:
        busy = [*self._tasks.values(), *self._to_read]
        versions = Counter(task.outlet.version for task in busy)
        now = time.monotonic()
        with self._changed:
            self._figures = {"rows": len(busy), "versions": dict(versions)}
            self._tokens.append((now, tokens))
            while self._tokens[0][0] < now - RECENT_S:
                self._tokens.popleft()
