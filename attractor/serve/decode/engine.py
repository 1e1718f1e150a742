"""One thread generates all texts: it reads prompts, gives every sequence its next token, and hands it out.

engine = Engine(publication)
stream = engine.submit(Job(prompt=[1, 2, 3], max_tokens=20, seed=0))
for token in stream: ...                 # or: async for token in stream
stream.finish, stream.version
engine.publish(newer)                    # for the jobs that start from now on
engine.close(drain_s=10)
"""

import logging
import sys
import threading
import time
from collections import abc, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from attractor.config import check_number, check_size
from attractor.generate import check_settings
from attractor.serve.decode.batch import Batch
from attractor.serve.decode.sequences import (
    PIECE,
    GeneratedToken,
    Publication,
    Sampling,
    Sequence,
    Touch,
    read_prompt,
)
from attractor.serve.decode.stream import Finish, Stream, StreamBuffer
from attractor.serve.errors import Busy

log = logging.getLogger("attractor")

RECENT_S = 10.0  # "tokens per second" is the rate of so many seconds
PATIENCE_S = 0.0003
"""So long may another thread keep Python to itself while a text waits; Python's 5 ms are several tokens."""


@dataclass(frozen=True)
class Job:
    """A text to generate. A token in `stop_tokens` ends it, and is not handed out.

    >>> from attractor import Job
    >>> Job(prompt=[1, 2, 3], max_tokens=20, temperature=0.8).path is None  # the mixture of all paths
    True

    An empty prompt, and settings that cannot be, are a ValueError.
    """

    prompt: abc.Sequence[int]
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
    """Jobs that share a pin are generated with one version: that of the first of them to start."""

    publication: Publication | None = None


@dataclass(eq=False)
class Task:
    """A job on its way through the engine."""

    job: Job
    buffer: StreamBuffer
    pin: Pin
    since: float = 0.0  # when it was admitted
    sequence: Sequence | None = None
    reading: abc.Iterator[None] | None = None
    generated: int = 0


def stream_of_its_own(device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU the texts go before what is learned, and neither waits for the other."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)  # what the readers share was made on another stream
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))


class Engine:
    def __init__(
        self,
        publication: Publication,
        *,
        max_rows: int = 64,
        max_waiting: int = 256,
        threads: int | None = None,
    ) -> None:
        """`threads` are torch's, for the engine's thread (default: as many as torch takes)."""
        check_size("max_rows", max_rows)
        check_size("max_waiting", max_waiting)
        self.max_rows, self.max_waiting, self.threads = max_rows, max_waiting, threads
        self.publication = publication
        self._changed = threading.Condition()  # guards the publication, the waiting jobs, and the figures
        self._waiting: deque[Task] = deque()
        self._closing_at: float | None = None
        self._rows = 0  # texts that are being generated
        self._tokens: deque[tuple[float, int]] = deque()  # when, and how many
        self._recent: deque[dict[str, Any]] = deque(maxlen=32)
        self._seconds_per_job = 1.0
        self._since = time.monotonic()
        # what follows belongs to the thread
        self._batch = Batch(publication.device)
        self._to_read: deque[Task] = deque()  # the first of them is reading
        self._tasks: dict[Sequence, Task] = {}
        sys.setswitchinterval(min(sys.getswitchinterval(), PATIENCE_S))
        self._thread = threading.Thread(target=self._run, name="attractor-engine", daemon=True)
        self._thread.start()

    # --- for any thread

    def publish(self, publication: Publication) -> None:
        """Use this for jobs that start from now on; those that started go on as they began."""
        now = self.publication
        if (publication.vocab_size, publication.device) != (now.vocab_size, now.device):
            raise ValueError(
                f"version {publication.version} has {publication.vocab_size} tokens on {publication.device}, "
                f"what is served {now.vocab_size} on {now.device}: start another engine"
            )
        with self._changed:
            self.publication = publication

    def submit(self, job: Job, pin: Pin | None = None) -> Stream:
        """Raises Busy when too many jobs wait, ValueError for a job that cannot be generated."""
        self._check(job)
        with self._changed:
            if self._closing_at is not None:
                raise Busy("the engine is closing", retry_after=5.0)
            if len(self._waiting) >= self.max_waiting:
                wait = self._seconds_per_job * len(self._waiting) / self.max_rows
                raise Busy(f"{len(self._waiting)} jobs wait already", retry_after=min(max(wait, 1.0), 60.0))
            buffer = StreamBuffer()
            self._waiting.append(Task(job, buffer, pin or Pin()))
            self._changed.notify_all()
        return Stream(buffer)

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
        """How many texts are generated and wait, the tokens per second, and the newest texts."""
        with self._changed:
            now = time.monotonic()
            count = sum(tokens for at, tokens in self._tokens if at > now - RECENT_S)
            seconds = min(RECENT_S, max(now - self._since, 0.1))
            return {
                "rows": self._rows,
                "waiting": len(self._waiting),
                "tokens_per_second": count / seconds,
                "recent": list(self._recent),
            }

    def close(self, drain_s: float = 10.0) -> None:
        """Take no new jobs, give the others `drain_s` seconds, and return when the thread has ended."""
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
            with stream_of_its_own(self._batch.device):
                while self._has_work():
                    self._turn()
            finish = "cancelled"
        finally:  # also after a failure no reader may wait for ever
            with self._changed:
                self._closing_at = self._closing_at or time.monotonic()
                left = [*self._waiting, *self._to_read, *self._tasks.values()]
                self._rows = 0
                for tasks in (self._waiting, self._to_read, self._tasks):
                    tasks.clear()
            self._batch = Batch(self._batch.device)
            for task in left:
                task.buffer.end(finish, "the engine has ended")

    def _has_work(self) -> bool:
        """Sleep until there is work, and return True; False when the engine is to end."""
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
            generated, failed = self._batch.step()
        except Exception as error:  # what it left behind is unknown
            log.exception("a step failed: its sequences end")
            generated, failed = [], dict.fromkeys(self._tasks, f"{type(error).__name__}: {error}")
            self._batch = Batch(self._batch.device)
        for sequence, reason in failed.items():
            self._end(self._tasks[sequence], "error", reason)
        self._hand_out(generated)
        self._account(len(generated))

    def _drop_cancelled(self) -> None:
        with self._changed:
            waiting = [task for task in self._waiting if task.buffer.cancelled]
            for task in waiting:
                self._waiting.remove(task)
        reading = [task for task in self._to_read if task.buffer.cancelled]
        for task in reading:
            self._to_read.remove(task)
        tasks = [task for task in self._tasks.values() if task.buffer.cancelled]
        for task in [*waiting, *reading, *tasks]:
            self._end(task, "cancelled", None)

    def _admit(self) -> None:
        """Start the next job, with the newest publication."""
        with self._changed:
            if not self._waiting or len(self._tasks) + len(self._to_read) >= self.max_rows:
                return
            task = self._waiting.popleft()
            publication = task.pin.publication = task.pin.publication or self.publication
        job, task.since = task.job, time.monotonic()
        task.buffer.version = publication.version
        try:
            sampling = Sampling(job.temperature, job.top_k, job.top_p, job.seed)
            if job.path not in (None, *publication.guard.names):
                raise ValueError(f"the path {job.path!r} was dropped")
            task.sequence = Sequence(publication, job.prompt, sampling, job.path)
        except Exception as error:
            self._end(task, "error", str(error))
        else:
            self._to_read.append(task)

    def _read_on(self) -> None:
        """Read texts whose context was full, and one new prompt; a piece in all, so that the others go on."""
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
        """Return how many tokens were read, or 0 if there are more, which have to wait."""
        task = self._to_read[0]
        sequence = task.sequence
        assert sequence is not None
        try:
            task.reading = task.reading or read_prompt(sequence)
            if next(task.reading, self) is not self:
                return 0
        except Exception as error:
            log.warning("a prompt failed", exc_info=error)
            self._to_read.popleft()
            self._end(task, "error", f"{type(error).__name__}: {error}")
            return 1
        task.reading = None
        self._to_read.popleft()
        self._tasks[sequence] = task
        self._batch.add(sequence)
        return sequence.length * len(sequence.caches)

    def _hand_out(self, generated: list[tuple[Sequence, GeneratedToken]]) -> None:
        for sequence, one in generated:
            task = self._tasks[sequence]
            if one.token in task.job.stop_tokens:
                self._end(task, "stop", None, one.touched)
                continue
            task.generated += 1
            task.buffer.put(one)
            if task.generated >= task.job.max_tokens:
                self._end(task, "length", None)
            elif sequence.is_full:
                self._read_again(task, sequence)

    def _read_again(self, task: Task, sequence: Sequence) -> None:
        try:
            self._batch.take_out(sequence)
        except Exception as error:
            self._end(task, "error", f"{type(error).__name__}: {error}")
        else:
            del self._tasks[sequence]
            self._to_read.append(task)

    def _end(self, task: Task, finish: Finish, message: str | None, touched: tuple[Touch, ...] = ()) -> None:
        sequence, now = task.sequence, time.monotonic()
        if sequence is not None and self._tasks.pop(sequence, None) is not None:
            if sequence in self._batch.sequences:
                self._note(task, sequence, finish)
            self._batch.remove([sequence])
        if finish in ("stop", "length"):
            self._seconds_per_job += 0.1 * (now - task.since - self._seconds_per_job)
        task.buffer.end(finish, message, touched)

    def _note(self, task: Task, sequence: Sequence, finish: Finish) -> None:
        seen = {
            "at": time.time(),
            "version": sequence.publication.version,
            "tokens": task.generated,
            "finish": finish,
            "posterior": self._batch.posterior(sequence),
        }
        with self._changed:
            self._recent.append(seen)

    def _account(self, tokens: int) -> None:
        now = time.monotonic()
        with self._changed:
            self._rows = len(self._tasks) + len(self._to_read)
            self._tokens.append((now, tokens))
            while self._tokens[0][0] < now - RECENT_S:
                self._tokens.popleft()
