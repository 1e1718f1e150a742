"""The HTTP side of a server: its app, and limits on connections that uvicorn does not have.

    app = create_app(service, ServeSettings(keys="keys.json"))
    Server(uvicorn_config(app, settings), service).run()

A connection that owes the server something, the head of a request or the rest of its body, has a time limit
for it. Where there are too many connections, the one that has owed for longest makes room for a new one, so
that slow clients can lock out no others.
"""

import asyncio
import errno
import logging
import math
import resource
from collections.abc import Callable
from socket import SOCK_STREAM, create_server, getaddrinfo, socket

import h11
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from attractor.serve.config import ServeSettings
from attractor.serve.http.auth import KeyRing, declared
from attractor.serve.http.changes import Changes, add_change_routes, add_lesson_routes, add_text_routes
from attractor.serve.http.middleware import Middleware, RateLimit
from attractor.serve.http.openai import add_openai_routes
from attractor.serve.http.schemas import add_error_replies
from attractor.serve.http.status import Metrics, add_dashboard, add_status_routes
from attractor.serve.service import Service
from attractor.version import __version__

RESERVED_FILES = 256
SHORT_S = 0.05  # a younger connection is not cut: its request may be about to be read
GRACE_S = 1.0  # the middleware answers a slow body before the connection is cut
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
log = logging.getLogger("attractor")


def create_app(service: Service, settings: ServeSettings) -> FastAPI:
    """Make the app of a service. The caller keeps the service: it is not closed with the app."""
    keys = None if settings.keys is None else KeyRing.load(settings.keys)
    app = FastAPI(
        title="Attractor",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = Metrics(service)
    add_openai_routes(app, service, settings, metrics)
    changes = Changes(service, metrics)
    if service.teaches == "lessons":
        add_lesson_routes(app, service, settings, changes)
    else:
        add_text_routes(app, settings, changes)
    add_change_routes(app, service, changes)
    add_status_routes(app, service, metrics)
    add_dashboard(app)
    add_error_replies(app)
    if undeclared := [route for route in app.routes if declared(route) is None]:
        raise AssertionError(f"routes without a declared scope: {[_name(route) for route in undeclared]}")
    app.add_middleware(
        Middleware, router=app.router, service=service, settings=settings, keys=keys, metrics=metrics
    )
    return app


def _name(route: BaseRoute) -> str:
    return str(getattr(route, "path", route))


class Server(uvicorn.Server):
    """A server that ends with its service: texts under way get their time, and waiting requests a reply."""

    def __init__(
        self, config: uvicorn.Config, service: Service, ready: Callable[[int], object] = lambda port: None
    ) -> None:
        """`ready` is called with the port when the server listens, and never where the port is taken."""
        super().__init__(config)
        self.service, self.ready = service, ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            try:
                self.ready(self.servers[0].sockets[0].getsockname()[1])
            except Exception:  # the server serves, also if nothing could be printed
                log.exception("the server is ready, and announcing it failed")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        log.info("closing: what is being written and learned is finished")
        closing = asyncio.create_task(asyncio.to_thread(self.service.close))
        await super().shutdown(sockets)
        await closing


def uvicorn_config(app: FastAPI, settings: ServeSettings, patience: float = 60.0) -> uvicorn.Config:
    """Limit connections, headers and logs, trust no headers of a proxy, and do not log what was asked.

    Requests under way are cut off `patience` seconds after the server began to close.
    """
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=limited(settings),
        backlog=64,  # so many are accepted before they are counted
        h11_max_incomplete_event_size=32 << 10,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        ws="none",
        timeout_keep_alive=math.ceil(settings.idle_timeout),
        timeout_graceful_shutdown=math.ceil(patience),
    )
    limit_logs("attractor", "asyncio", "uvicorn.error")
    return config


def check_address(settings: ServeSettings) -> None:
    """An OSError where nobody could listen now."""
    found = getaddrinfo(settings.host, settings.port, type=SOCK_STREAM)
    for family, *_, address in found:
        try:
            create_server(address[:2], family=family, backlog=1).close()
        except OSError as error:
            is_elsewhere = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
            if not is_elsewhere or len(found) == 1:  # of a name's addresses some may be of no interface
                raise


# --- connections and logs


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
