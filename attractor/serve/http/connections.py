"""Limits on connections that uvicorn does not have: how many, how slow, and how much is logged about them.

A connection that owes the server something, the head of a request or the rest of its body, has a time limit
for it. Where there are too many connections, the one that has owed for longest makes room for a new one, so
that slow clients can lock out no others.
"""

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from attractor.serve.config import ServeSettings

RESERVED_FILES = 256
SHORT_S = 0.05  # a younger connection is not cut: its request may be about to be read
GRACE_S = 1.0  # the middleware answers a slow body before the connection is cut
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class LimitedConnection(H11Protocol):
    """uvicorn's connection, with the limits of `settings`; see `limited`."""

    settings: ServeSettings
    owing: dict["LimitedConnection", float]  # the connections that owe something, and since when

    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _owes: tuple[object, object] | None = None  # the kind, and the request before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections(self.settings):
            oldest, since = next(iter(self.owing.items()), (self, self.loop.time()))
            if self.loop.time() - since < SHORT_S:
                transport.write(FULL)
                transport.close()
                return
            oldest.cut()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """A client that does not read its reply has the time of an idle one."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.settings.idle_timeout, self.cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def cut(self) -> None:
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        """Begin or end the time limit, where what the client owes has changed."""
        state = self.conn.their_state
        owes = (state, self.cycle) if state in (h11.IDLE, h11.SEND_BODY) else None
        if owes == self._owes:
            return
        self._forget()
        if owes is not None and not self.transport.is_closing():
            settings = self.settings
            seconds = settings.idle_timeout if state is h11.IDLE else settings.body_timeout + GRACE_S
            self._owes, self._deadline = owes, self.loop.call_later(seconds, self.cut)
            self.owing[self] = self.loop.time()

    def _forget(self) -> None:
        self._owes = None
        self.owing.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited(settings: ServeSettings) -> type[LimitedConnection]:
    """The connections of one server."""
    return type("Connection", (LimitedConnection,), {"settings": settings, "owing": {}})


def most_connections(settings: ServeSettings) -> int:
    """The limit of the settings, or less where the process may open few files: each connection is one.

    The rest is for other files, and for connections that are accepted before they are counted.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, max(files - RESERVED_FILES, files // 4)))


# --- logs


class RateLimit:
    """Lets `burst` events through, and from then on one every `seconds`."""

    def __init__(
        self, burst: int = 20, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.burst, self.seconds, self.clock = burst, seconds, clock
        self._lock = threading.Lock()
        self._left, self._since, self._dropped = float(burst), clock(), 0

    def take(self) -> int | None:
        """None for an event that is to be dropped; otherwise how many were dropped since the last one."""
        with self._lock:
            now = self.clock()
            self._left = min(self.burst, self._left + (now - self._since) / self.seconds)
            self._since = now
            if self._left < 1:
                self._dropped += 1
                return None
            self._left -= 1
            dropped, self._dropped = self._dropped, 0
            return dropped


class LogRateLimit(logging.Filter):
    """A rate limit for every line of code that logs warnings or errors."""

    def __init__(self, new: Callable[[], RateLimit] = RateLimit) -> None:
        super().__init__()
        self._new = new
        self._limits: dict[tuple[str, int], RateLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        where = (record.pathname, record.lineno)
        if where not in self._limits:
            self._limits[where] = self._new()
        dropped = self._limits[where].take()
        if dropped:
            record.msg, record.args = f"{record.getMessage()} (and {dropped} more like it)", None
        return dropped is not None


def limit_logs(*names: str) -> None:
    """Limit the rate of these loggers, each of them once."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(each, LogRateLimit) for each in logger.filters):
            logger.addFilter(LogRateLimit())
