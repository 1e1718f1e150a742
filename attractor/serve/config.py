"""What a server takes on, and which changes it keeps. These options import no torch: `--help` shows them."""

from dataclasses import dataclass
from typing import Literal

from attractor.config import JSONConfig, check_number, check_size

SyncName = Literal["always", "off"]


@dataclass(frozen=True, kw_only=True)
class Rules(JSONConfig):
    """Which changes are kept: how much canaries may suffer, and how much a source may teach."""

    canary_rise: float = 0.01
    """Share by which a canary's perplexity may rise for readers, beyond what the guard's bound allows."""
    drift: float | None = 2.0
    """Nats per token that a path alone may lose on a canary, over all that it learned."""
    canary_tokens: int = 512
    """The tokens of each canary that every change is judged by; an audit takes all of it. Where lessons are
    taught, it is the length of the canary that the base writes; the others are taken whole, if they fit."""
    audit_every: int = 64
    """Learned texts after which whole canaries are read; where one fell, all goes back to the last audit."""
    text_tokens: int = 65_536
    """The most tokens of texts that are learned at once, or of a lesson."""
    source_tokens: int | None = None
    """The most tokens that one source may teach, in all."""

    def __post_init__(self) -> None:
        check_number("canary_rise", self.canary_rise, "a share, 0 or more", lambda share: share >= 0)
        if self.drift is not None:
            check_number("drift", self.drift, "a number of nats, 0 or more", lambda nats: nats >= 0)
        for name in ("canary_tokens", "audit_every", "text_tokens"):
            check_size(name, getattr(self, name))
        if self.source_tokens is not None:
            check_size("source_tokens", self.source_tokens)


@dataclass(frozen=True, kw_only=True)
class Limits(JSONConfig):
    """How much a server takes on at a time."""

    rows: int = 64
    """Texts that are written at the same time, as one batch."""
    waiting: int = 256
    """Texts that wait for a place."""
    learning: int = 64
    """Requests to learn that wait for the writer."""
    administration: int = 8
    """Rollbacks and deletions that wait for the writer: they have places of their own, and go first."""
    snapshot_every: int = 256
    """Changes from one snapshot to the next: what a start has to read again, at most."""
    keep_snapshots: int = 8
    """Snapshots that are kept: how far back a rollback can go."""
    learning_share: float = 0.4
    """The share of the time that learning may take while texts are being written."""
    drain: float = 10.0
    """Seconds that texts under way have to end when the server does."""

    def __post_init__(self) -> None:
        for name in ("rows", "waiting", "learning", "administration", "snapshot_every", "keep_snapshots"):
            check_size(name, getattr(self, name))
        check_number("learning_share", self.learning_share, "0 < share <= 1", lambda s: 0 < s <= 1)
        check_number("drain", self.drain, "a number of seconds, 0 or more", lambda s: s >= 0)
