"""The parts of a server put together: readers in the engine, one writer in a thread, a store behind it."""

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch

from attractor.continual.guarded import GuardedLearner
from attractor.continual.lessons import Lessons
from attractor.serve.config import Limits, Rules, SyncName
from attractor.serve.decode.engine import Engine, Job, Pin
from attractor.serve.decode.stream import Stream
from attractor.serve.errors import Busy, Unavailable
from attractor.serve.learning.canaries import SELF, Canaries, self_canary
from attractor.serve.learning.catalogue import searched
from attractor.serve.learning.guarded import GuardedTeacher, identity
from attractor.serve.learning.teacher import Teacher
from attractor.serve.store import Store
from attractor.tokenizer import Tokenizer

if TYPE_CHECKING:
    from attractor.hf.net import Retrofit

log = logging.getLogger("attractor")

READ_AGAIN = 64 << 20
"""Bytes of records that a start may read again: where there are more, a snapshot is written at the end."""
PAUSE = 0.02
"""Seconds between two looks whether the writer may go on."""
Verb = Literal["learn", "revise", "import_lessons", "rollback", "forget", "forget_lessons", "forget_where"]
TEACHING = ("learn", "revise", "import_lessons")
"""These learn, and wait in one queue; the others have places of their own."""


def share_of_cores() -> int:
    """Half of what torch would use: the thread that writes texts and the one that learns work side by side.

    torch keeps the number for each thread. Two that both take every core get in each other's way.
    """
    return max(1, torch.get_num_threads() // 2)


@contextmanager
def no_snapshot_is_no_harm() -> Iterator[None]:
    """The records have everything: it only takes longer to start."""
    try:
        yield
    except Exception as error:  # none of them may end the writer, or keep the folder open
        log.warning("no snapshot could be written: %s", error)


@contextmanager
def closed_on_error(store: Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.close()
        raise


@dataclass(order=True)
class Call:
    """A change that waits for the writer, or without an action the end of its work."""

    rank: int  # the smallest goes first
    number: int
    kind: str = field(default="", compare=False)
    action: Callable[[], dict[str, Any]] | None = field(default=None, compare=False)
    done: Future[dict[str, Any]] = field(default_factory=Future, compare=False)


class Service:
    """A model that writes texts for many readers and learns meanwhile. Close it, or use it in `with`.

    `Service.open` takes a guarded learner and `Service.open_lessons` a pretrained model. Methods may be
    called from any thread; those that change something return when the change is durable and in use.

    >>> import tempfile
    >>> from attractor import GPT, APNConfig, GPTConfig, GuardedLearner, Job, Service, tokenizer
    >>> shape = GPTConfig(
    ...     vocab_size=256, context=32, num_layers=2, num_heads=2, dim=32, ffn="apn", apn=APNConfig(rank=8)
    ... )
    >>> learner = GuardedLearner(GPT(shape), tokenizer.ByteTokenizer())
    >>> with Service.open(learner, tempfile.mkdtemp()) as service:
    ...     answer = service.learn(["the quick brown fox jumps over the lazy dog"], source="fox", key="k1")
    ...     stream = service.submit(Job(prompt=list(b"the "), max_tokens=3))
    ...     print(answer["version"], answer["repeated"], len(list(stream)), stream.version)
    1 False 3 1

    What cannot be asked is a ValueError. `attractor.serve.errors` has the others: too much waits (Busy), a
    rule refuses it (Refused), or the disk does (Unavailable).
    """

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Tokenizer,
        *,
        name: str,
        rules: Rules,
        limits: Limits,
        learning: bool,
        stop_tokens: Iterable[int],
    ) -> None:
        """Use `open` or `open_lessons`."""
        self.teacher, self.tokenizer, self.store = teacher, tokenizer, teacher.store
        self.teaches = teacher.teaches
        self.name, self.stop_tokens = name, frozenset(stop_tokens)
        self.context, self.vocab_size = teacher.publication.context, teacher.publication.vocab_size
        self.limits, self.rules = limits, rules
        self.started = time.time()
        self._learning = learning
        self._calls: queue.PriorityQueue[Call] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._places = {"learning": 0, "administration": 0}  # calls that wait or are being carried out
        self._closed, self._ending = False, threading.Event()
        self._pace = 1.0  # seconds that a call took lately
        self._since_snapshot = 0
        self._failure: str | None = None  # of the last write
        self._behind: str | None = None  # why what others have committed is not in use
        self._snapshots: threading.Thread | None = None
        self._preparing: str | None = None  # what is being done before the first lesson
        self._all_cores, self._some_cores = torch.get_num_threads(), share_of_cores()
        self._working_since = 0.0  # when the writer last paused
        self.engine = Engine(
            self.teacher.publication,
            max_rows=limits.rows,
            max_waiting=limits.waiting,
            threads=self._some_cores,
        )
        self.teacher.publish = self.engine.publish
        self.teacher.breathe = self._breathe
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._writer.start()

    @classmethod
    def open(
        cls,
        learner: GuardedLearner,
        data: str | Path,
        *,
        name: str = "attractor",
        canaries: Mapping[str, np.ndarray] | None = None,
        rules: Rules | None = None,
        limits: Limits | None = None,
        sync: SyncName = "always",
        learning: bool = True,
        stop_tokens: Iterable[int] = (),
    ) -> Self:
        """Serve a learner without overlays; what it learns is kept in the folder `data`.

        Texts that come over HTTP end with any of `stop_tokens`.
        """
        rules, limits = rules or Rules(), limits or Limits()
        if learner.tokenizer is None:
            raise ValueError("texts come in and go out: the model needs a tokenizer")
        if learner.config.switch_rate:
            raise ValueError(f"switch_rate={learner.config.switch_rate} is not for serving: set it to 0")
        texts = dict(canaries or {})
        if SELF in texts:
            raise ValueError(f"{SELF!r} is the canary that the base writes: choose another name")
        texts[SELF] = self_canary(learner.base, rules.canary_tokens)
        watch = Canaries(learner.base, texts, rules)
        store = Store.open(data, identity=identity(learner), sync=sync, keep_snapshots=limits.keep_snapshots)
        with closed_on_error(store):
            teacher = GuardedTeacher(learner, store, watch, rules)
            options: dict[str, Any] = {"name": name, "rules": rules, "limits": limits, "learning": learning}
            return cls(teacher, learner.tokenizer, **options, stop_tokens=stop_tokens)

    @classmethod
    def open_lessons(
        cls,
        net: "Retrofit",
        lessons: Lessons,
        tokenizer: Tokenizer,
        data: str | Path,
        *,
        name: str = "attractor",
        canaries: Mapping[str, np.ndarray] | None = None,
        context: int | None = None,
        rules: Rules | None = None,
        limits: Limits | None = None,
        sync: SyncName = "always",
        shared: bool = False,
        learning: bool = True,
        stop_tokens: Iterable[int] = (),
    ) -> Self:
        """Serve a pretrained model that was made `teachable`; its lessons are kept in the folder `data`.

        A new folder takes over the lessons that the model has; otherwise the folder's take their place.
        Several services can share a folder, each in a process of its own: what one is taught, all know.
        """
        from attractor.serve.learning.lessons import LessonTeacher, identity_of

        rules, limits = rules or Rules(), limits or Limits()
        store = Store.open(data, identity=identity_of(net, lessons), sync=sync, shared=shared)
        with closed_on_error(store):
            teacher = LessonTeacher(net, lessons, store, rules, canaries=canaries, context=context)
            options: dict[str, Any] = {"name": name, "rules": rules, "limits": limits, "learning": learning}
            return cls(teacher, tokenizer, **options, stop_tokens=stop_tokens)

    # --- reading

    @property
    def version(self) -> int:
        return self.teacher.version

    @property
    def learning(self) -> bool:
        return self._learning

    def paths(self) -> list[str]:
        return list(self.teacher.publication.paths)

    def submit(self, job: Job, pin: Pin | None = None) -> Stream:
        """Jobs that share a pin are written with the same version."""
        if not self.engine.is_alive and not self._closed:
            raise Unavailable("the engine has stopped: start the server again")
        return self.engine.submit(job, pin)

    def versions(self, limit: int = 100, before: int | None = None) -> list[dict[str, Any]]:
        """The newest first."""
        shown = self.version + 1
        return self.store.history(limit, shown if before is None else min(before, shown))

    def lessons(self, **which: Any) -> list[dict[str, Any]]:
        """Lessons, the newest first: see `attractor.serve.learning.catalogue.searched`."""
        return searched(self.teacher.catalogue.shown, **which)

    def lesson(self, number: int) -> dict[str, Any] | None:
        return self.teacher.catalogue.shown.get(number)

    def export_lessons(self, numbers: Sequence[int] | None = None) -> bytes:
        """A file with lessons, for a server with the same base."""
        return self.teacher.export_lessons(numbers)

    def overlays(self) -> dict[str, dict[str, Any]]:
        return self.teacher.figures["overlays"]

    def ready(self) -> tuple[bool, str]:
        if self._closed:
            return False, "closing"
        if not self._writer.is_alive():
            return False, "the writer has stopped"
        if not self.engine.is_alive:
            return False, "the engine has stopped"
        if self._failure or self._behind:
            return True, "learning is not possible now"
        return True, f"ready; before the first lesson, {self._preparing}" if self._preparing else "ready"

    # --- changing

    def learn(
        self,
        what: Sequence[Any],
        source: str,
        key: str | None = None,
        sender: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Learn texts, or `attractor.serve.learning.lessons.Asked` where lessons are taught.

        A `key` is for this request of this `sender` alone; given again, the answer is given again.
        """
        return self.begin("learn", what, source, key, sender, **options).result()

    def rollback(self, version: int, key: str | None = None, sender: str | None = None) -> dict[str, Any]:
        """Everything as it was at a version, but for what was erased since."""
        return self.begin("rollback", version, key, sender).result()

    def forget(
        self, source: str, key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        """A rollback can bring a source back that was forgotten, and none that was erased."""
        return self.begin("forget", source, key, sender, erase).result()

    def forget_lessons(
        self, numbers: Sequence[int], key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        """Take lessons back by their numbers, where lessons are taught."""
        return self.begin("forget_lessons", numbers, key, sender, erase).result()

    def begin(self, verb: Verb, *arguments: Any, **options: Any) -> Future[dict[str, Any]]:
        """Queue a change for the writer. It can be cancelled until the writer takes it up.

        Raises Busy where too many wait already.
        """
        if not self._learning:
            raise Unavailable("this server does not learn: it was started without it")
        kind, rank = ("learning", 1) if verb in TEACHING else ("administration", 0)
        done: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._closed:
                raise Unavailable("the server is closing")
            if (count := self._places[kind]) >= getattr(self.limits, kind):
                message = f"{count} calls wait already, as many as may (limits.{kind})"
                raise Busy(message, retry_after=max(1.0, count * self._pace))
            self._places[kind] += 1
            action = functools.partial(getattr(self.teacher, verb), *arguments, **options)
            self._calls.put(Call(rank, next(self._numbers), kind, action, done))
        return done

    def _write(self) -> None:
        self._working_since = time.monotonic()
        self._breathe()
        if self._learning:
            self._prepare()
        while (action := (call := self._next_call()).action) is not None:
            done = call.done
            if not done.set_running_or_notify_cancel():  # the client has disconnected
                with self._lock:
                    self._places[call.kind] -= 1
                continue
            self._working_since = started = time.monotonic()
            try:
                with self._turn():
                    answer = action()
            except BaseException as error:
                self._failure = str(error) if isinstance(error, Unavailable) else None
                done.set_exception(error)
            else:
                self._failure = None
                self._since_snapshot += not answer["repeated"]
                done.set_result(answer)
            with self._lock:
                self._places[call.kind] -= 1
            self.store.settle()
            if self.teacher.keeps_snapshots and self._since_snapshot >= self.limits.snapshot_every:
                self._begin_snapshot()
            self._breathe()
            with self._lock:
                self._pace = 0.9 * self._pace + 0.1 * (time.monotonic() - started)

    def _next_call(self) -> Call:
        while True:
            try:
                return self._calls.get(timeout=self.limits.follow if self.store.shared else None)
            except queue.Empty:
                self._follow()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be alone among the servers that share the store, and know all that they have committed."""
        until = time.monotonic() + self.limits.turn

        def wait() -> None:
            self._check_open()
            if time.monotonic() > until:
                message = f"others that share the store have been changing it for {self.limits.turn:g} s"
                raise Busy(message, retry_after=self.limits.turn)
            self._follow()
            self._ending.wait(PAUSE)

        self._check_open()
        with self.teacher.turn(wait):
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the server is closing")

    def _follow(self) -> None:
        """Take over what others have committed, if they can have changed the store."""
        if self.store.has_turn:
            return
        try:
            self.teacher.catch_up()
            self._behind = None
        except Exception as error:  # texts go on with what there is
            if self._behind != str(error):
                is_known = isinstance(error, Unavailable)
                log.error("%s (%s)", error, error.__cause__, exc_info=not is_known)
            self._behind = str(error)

    def _prepare(self) -> None:
        """What comes before the first lesson. It stops for a call: a lesson does the rest of it."""
        try:
            for doing in self.teacher.prepare():
                self._preparing = doing
                self._breathe()
                if not self._calls.empty():
                    break
        except Exception:  # the first lesson will say so
            log.exception("what comes before the first lesson failed")
        self._preparing = None

    def _breathe(self) -> None:
        """A pause of the writer, after a change or between the passes of a lesson.

        While texts are being written, learning takes its share of the time, and half of the cores.
        """
        spent = time.monotonic() - self._working_since
        share = self.limits.share_on(self.teacher.publication.device.type)
        until = time.monotonic() + spent * (1 - share) / share
        self._let_readers_go_on(until)
        is_alone = self.engine.stats()["rows"] == 0
        torch.set_num_threads(self._all_cores if is_alone else self._some_cores)  # of this thread alone
        self._working_since = time.monotonic()

    def _let_readers_go_on(self, until: float) -> None:
        self._follow()
        while self.engine.stats()["rows"] and (left := until - time.monotonic()) > 0:
            if self._ending.wait(min(left, PAUSE)):
                return
            self._follow()

    def _begin_snapshot(self) -> None:
        """It is read from the records, in a thread of its own that takes its time."""
        if self._snapshots is not None and self._snapshots.is_alive():
            return
        self._since_snapshot = 0
        self._snapshots = threading.Thread(target=self._snapshot, args=(0.2,), daemon=True)
        self._snapshots.start()

    def _snapshot(self, share: float = 1.0) -> None:
        with no_snapshot_is_no_harm():
            self.store.snapshot(share=share)

    # --- watching

    def monitor(self) -> dict[str, Any]:
        """Figures for a dashboard, as `attractor.serve.http.status` describes them; no poll waits."""
        learned, figures = self.teacher.figures, self.engine.stats()
        recent = [
            {"at": seen["at"], "version": seen["version"], "shares": seen["posterior"]}
            for seen in figures["recent"]
        ]
        with self._lock:
            count = sum(self._places.values())
        budget = self.rules.drift
        drift = (
            {} if budget is None else {n: {"used": u, "budget": budget} for n, u in learned["drift"].items()}
        )
        return {
            "version": self.version,
            "uptime": time.time() - self.started,
            "learning": self._learning,
            "progressive": learned["progressive"],
            "canaries": learned["canaries"],
            "usage": learned["usage"],
            "overlays": learned["overlays"],
            "drift": drift,
            "posteriors": recent,
            "lessons": learned.get("lessons"),
            "queue": {
                "generating": figures["rows"],
                "waiting": figures["waiting"],
                "learning": count,
                "limit": self.limits.learning,
            },
            "tokens_per_second": figures["tokens_per_second"],
            "journal": {
                "last": self.store.last,
                "bytes": self.store.nbytes,
                "recovered": self.store.recovered,
                "shared": self.store.shared,
                "behind": self._behind,
            },
        }

    # --- ending

    def close(self) -> None:
        """Finish what was begun, and let others open the folder. What waits is Unavailable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ending.set()
            self._calls.put(Call(2, next(self._numbers)))
        self.engine.close(self.limits.drain)
        self._writer.join()
        if self._snapshots is not None:
            self._snapshots.join()
        with no_snapshot_is_no_harm():
            if self.teacher.keeps_snapshots and self.store.bytes_to_read > READ_AGAIN:
                self.store.snapshot()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
