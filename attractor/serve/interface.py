"""What the HTTP side asks of the rest of the server, and nothing more."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attractor.serve.monitoring import Monitor
from attractor.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A text to be written."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    path: str | None = None  # None: the mixture
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Written:
    token: int
    logprob: float
    shares: dict[str, float]  # how much each path had to do with it


class Ticket(Protocol):
    """A job under way. Iterating gives its tokens; `finish` says why when there are no more."""

    version: int | None  # of the weights, from the first token on
    finish: str | None  # "stop", "length", "cancelled" or "error"
    message: str | None  # of an error

    def __aiter__(self) -> AsyncIterator[Written]: ...
    def cancel(self) -> None: ...


class Service(Protocol):
    """Learning calls block until their effect is durable, and are made from threads of their own."""

    name: str
    tokenizer: Tokenizer
    context: int
    vocab_size: int

    @property
    def version(self) -> int: ...
    @property
    def learning(self) -> bool: ...
    def paths(self) -> list[str]: ...
    def submit(self, job: Any) -> Any: ...
    def learn(self, texts: list[str], source: str, key: str | None) -> dict[str, Any]: ...
    def versions(self, limit: int, before: int | None) -> list[dict[str, Any]]: ...
    def rollback(self, version: int, key: str | None = None) -> dict[str, Any]: ...
    def forget(self, source: str, key: str | None = None) -> dict[str, Any]: ...
    def overlays(self) -> dict[str, dict[str, Any]]: ...
    def monitor(self) -> Monitor: ...
    def ready(self) -> tuple[bool, str]: ...
