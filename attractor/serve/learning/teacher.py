"""What a server asks of the one writer, whatever kind of model it teaches.

    teacher.publication                       # what readers read, never written again
    teacher.learn(what, "kjv", key="k1"); teacher.rollback(7); teacher.forget("kjv")

It is not for several threads: a service calls it from one. A change that fails, is refused or cannot be made
durable leaves every byte as it was.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from attractor.serve.config import Rules
from attractor.serve.decode.sequences import Publication
from attractor.serve.errors import Refused, StoreDamaged, Unavailable
from attractor.serve.learning.catalogue import Catalogue
from attractor.serve.store import Change, State, Store

log = logging.getLogger("attractor")

Teaches = Literal["texts", "lessons"]
"""What a server learns: texts, in overlays over a model of our own, or lessons that own their patches."""
RECENT = 512
"""Changes of which the course is kept for charts."""


class Teacher:
    """The part that every kind of teacher has: requests that were answered before, commits, publications."""

    teaches: Teaches
    publication: Publication
    figures: dict[str, Any]
    """Figures for watchers, from any thread: they are replaced, never changed."""
    keeps_snapshots: bool
    """Whether states of versions are kept beside the records."""

    def __init__(self, store: Store, rules: Rules) -> None:
        self.store, self.rules = store, rules
        self.catalogue = Catalogue()  # of lessons that can be told apart
        self.publish: Callable[[Publication], None] = lambda publication: None
        self.breathe: Callable[[], None] = lambda: None  # is called between pieces of long work

    @property
    def version(self) -> int:
        return self.publication.version

    @property
    def is_current(self) -> bool:
        """Readers have the newest version; if not, showing it failed after it was durable."""
        return self.version == self.store.last

    # --- sharing a store

    @contextmanager
    def turn(self, wait: Callable[[], None]) -> Iterator[None]:
        """Be alone among the servers that share the store, and know all that they have committed.

        While others have their turn, `wait` is called again and again; it gives up by raising.
        """
        with ExitStack() as stack:
            with self._taking_over():
                stack.enter_context(self.store.turn(wait))
                self.catch_up()
            yield

    def catch_up(self) -> None:
        """Take over what others have committed to a store that is shared; Unavailable where that fails."""
        if self.store.shared:
            with self._taking_over():
                self.store.catch_up()
                if not self.is_current:
                    self._take_over()

    @contextmanager
    def _taking_over(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            record = getattr(error, "record", None)
            what = "what others have changed" if record is None else f"record {record}"
            raise Unavailable(
                f"version {self.version} stays in use and nothing can be changed, because {what} cannot be "
                f"taken over: {reason_of(error)}"
            ) from error

    # --- what kinds of teachers differ in

    def _take_over(self) -> None:
        """Bring readers and writer to the newest version of a store that is shared."""
        raise NotImplementedError

    def prepare(self) -> Iterator[str]:
        """Do what has to be done before the first lesson, piece by piece, and say what is being done."""
        yield from ()

    def learn(
        self,
        what: Sequence[Any],
        source: str,
        key: str | None = None,
        sender: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Learn something from a source: whole or not at all. The answer says what became of it."""
        raise NotImplementedError

    def forget(
        self, source: str, key: str | None = None, sender: str | None = None, erase: bool = False
    ) -> dict[str, Any]:
        """Take away all that a source taught. A rollback brings it back, unless it is erased."""
        raise NotImplementedError

    def export_lessons(self, numbers: Sequence[int] | None = None) -> bytes:
        """A file with these lessons, or with all of them. Any thread may ask for it."""
        raise LookupError("this server learns texts, which cannot be told apart any more")

    def rollback(self, version: int, key: str | None = None, sender: str | None = None) -> dict[str, Any]:
        """Everything as it was at a version, to the bit, but for what was erased since."""
        raise NotImplementedError

    # --- what they share

    def _asked(self, key: str | None, sender: str | None, *what: Any) -> dict[str, Any]:
        """What a record keeps of a request: its key, what that is bound to, and who sent it."""
        return {"key": key, "sender": sender, "content": None if key is None else content(*what)}

    def _known(self, key: str | None, sender: str | None, content: str | None) -> dict[str, Any] | None:
        """The answer that was given to this key before, and the version that is there now."""
        if key is None or content is None:
            return None
        try:
            answer = self.store.answer_to(key, sender, content)
        except (OSError, StoreDamaged) as error:
            log.error("what was answered to a key cannot be read: %s", error)
            raise Unavailable("nothing was changed, because earlier answers cannot be read") from error
        return None if answer is None else {**answer, "repeated": True, "now": self.version}

    def _state_at(self, version: int) -> State:
        """What everything was like at a version that is kept."""
        if not self.store.oldest <= version <= self.store.last:
            raise ValueError(
                f"version {version} is not kept: there are {self.store.oldest} to {self.store.last}"
            )
        try:
            return self.store.state_at(version)
        except (OSError, StoreDamaged) as error:
            log.error("version %d cannot be read: %s", version, error)
            raise Unavailable(f"nothing was changed, because version {version} cannot be read") from error

    def _check_quota(self, source: str, taught: int, tokens: int) -> None:
        """Refused where a source that taught so many tokens may not teach these, too."""
        most = self.rules.source_tokens
        if most is not None and taught + tokens > most:
            raise Refused(
                f"{source!r} taught {taught:,} tokens and may teach {most:,} in all; these are {tokens:,}"
            )

    def _commit(self, *changes: Change) -> None:
        if not self.is_current:
            raise Unavailable("a version is durable and could not be shown: start the server again")
        try:
            self.store.commit_all(changes, at=now())
        except (OSError, StoreDamaged) as error:
            log.error("a %s could not be made durable: %s", changes[-1].kind, error)
            raise Unavailable(
                f"nothing was changed, because it could not be made durable: {reason_of(error)}"
            ) from error


def reason_of(error: OSError | ValueError) -> str:
    """What clients are told: no path is in it."""
    if isinstance(error, StoreDamaged):
        return error.reason
    return str(getattr(error, "strerror", None) or error)


def content(*parts: Any) -> str:
    """A hash of what was asked for, which its idempotency key is bound to."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
