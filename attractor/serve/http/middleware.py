"""The checks that every request passes before a route sees it, and the record of its reply.

The checks are, in this order: the key and its scopes, the path and the method, the size of the body and the
time it takes, and the depth of its JSON and the number of its values. A body is read only when nothing else
is wrong, and parsed only when this cannot take long. Afterwards one line of JSON goes to the logger
"attractor.audit" for every request that changes or generates something, and for every refusal. It never holds
any text.
"""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attractor.serve.config import ServeSettings
from attractor.serve.http.auth import LOCAL, Endpoint, Key, KeyRing, declared, local_problem
from attractor.serve.http.schemas import VERSION, Problem, problem_of
from attractor.serve.http.status import Metrics
from attractor.serve.service import Service

# No script but ours runs, and no eval. plotly.js fills an empty <style> by script and sets style attributes.
# Its style sheet for maps, which are not drawn here, is stopped, and the browser's console says so.
EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' {EMPTY}",
        "style-src-attr 'unsafe-inline'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
BRACKETS = bytes.maketrans(b"{}", b"[]")
OTHERS = bytes(set(range(256)) - set(b"[]{}"))
SMALL = 16 << 10  # bytes of a body that are checked faster than a thread is found
CLOSE = {"Connection": "close"}
FILE = "application/octet-stream"

audit = logging.getLogger("attractor.audit")


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


class Middleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        service: Service,
        settings: ServeSettings,
        keys: KeyRing | None,
        metrics: Metrics,
    ) -> None:
        self.app, self.router, self.service, self.settings = app, router, service, settings
        self.keys, self.metrics = keys, metrics
        self.checks = CapacityLimiter(1)  # bodies that are checked beside the event loop
        self.refusals = RateLimit(burst=100, seconds=1.0)  # audit lines of requests without a key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there are no websockets here
            return await send({"type": "websocket.close", "code": 1008})
        exchange = Exchange(self, scope, receive, send)
        with self.metrics.in_flight.track_inprogress():
            await exchange.run()


class Exchange:
    """A request and its reply."""

    def __init__(self, middleware: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self.middleware, self.scope, self._receive, self._send = middleware, scope, receive, send
        self.headers, self.method = Headers(scope=scope), scope["method"]
        self.route, self.other_methods = find_route(middleware.router, scope)
        self.name = getattr(self.route, "path", "unmatched")
        self.key: Key | None = None
        self.status: int | None = None
        self.version: str | None = None
        self.body: bytes | None = b""
        self.started = time.perf_counter()
        # Routes add what they know: source, version.
        self.noted: dict[str, Any] = scope.setdefault("state", {}).setdefault("audit", {})

    async def run(self) -> None:
        try:
            self._authorize()
            self._check_target()
            await self._read()
            await self.middleware.app(self.scope, self.receive, self.send)
        except Exception as error:
            if self.status is not None:  # the reply has begun, and can only be cut off
                raise
            await problem_of(error).reply()(self.scope, self.receive, self.send)
        finally:
            self._note()

    def _authorize(self) -> None:
        scopes, keys = declared(self.route), self.middleware.keys
        if keys is None:
            if problem := local_problem(self.method, self.headers):
                raise Problem(403, problem, code="not_local")
            self.key = LOCAL
        else:
            self.key = keys.find(self.headers.get("authorization"))
        self.scope["state"]["key"] = self.key
        if self.route is None or scopes == frozenset():
            return  # there is no such route, or it is open
        if self.key is None:
            raise Problem(
                401,
                "this needs a key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if scopes is None or not scopes & self.key.scopes:
            wanted = " or ".join(sorted(scopes or ["(none)"]))
            raise Problem(403, f"this key may not do that: it needs the scope {wanted}", code="missing_scope")

    def _check_target(self) -> None:
        if self.route is None:
            raise Problem(404, "there is nothing at this path", code="not_found")
        if self.other_methods:
            allowed = ", ".join(sorted(self.other_methods))
            raise Problem(405, f"this path takes only {allowed}", headers={"Allow": allowed})
        if "content-length" in self.headers and "transfer-encoding" in self.headers:
            message = (
                "send either Content-Length or Transfer-Encoding: with both, the end of a body is unclear"
            )
            raise Problem(400, message, headers=CLOSE)

    async def _read(self) -> None:
        """Read the whole body, so that no route waits for a slow one or holds a large one."""
        if self.method in ("GET", "HEAD", "OPTIONS"):
            return
        settings, is_file = self.middleware.settings, wants_bytes(self.route)
        limit, seconds = settings.max_file if is_file else settings.max_body, settings.body_timeout
        too_large = Problem(413, f"the body is larger than {limit:,} bytes: send less", code="too_large")
        length = self.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Problem(400, "the client disconnected before its request was complete")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            late = f"the body did not arrive within {seconds:g} seconds"
            raise Problem(408, late, code="timeout", headers=CLOSE) from None
        self.body = bytes(body)
        if is_file:
            self._check_type(FILE, "a file")
        else:
            await self._check_body(self.body)

    async def _check_body(self, body: bytes) -> None:
        if not body:
            return
        self._check_type("application/json", "JSON")
        settings = self.middleware.settings
        arguments = (body, settings.max_depth, settings.max_values)
        if len(body) <= SMALL:
            problem = json_problem(*arguments)
        else:
            problem = await to_thread.run_sync(json_problem, *arguments, limiter=self.middleware.checks)
        if problem is not None:
            raise Problem(400, problem)

    def _check_type(self, wanted: str, what: str) -> None:
        """A form on a page of another site can send none of the types that are wanted here."""
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
            raise Problem(415, f"the body must be {what}, with Content-Type: {wanted}")

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
            if self.key is not None:  # others do not learn how often the server has learned
                headers.setdefault(VERSION, str(self.middleware.service.version))
                self.version = headers[VERSION]
        await self._send(message)

    def _note(self) -> None:
        status, metrics = self.status or 499, self.middleware.metrics  # 499: the client had disconnected
        method = self.method if self.method in ("GET", "POST", "PUT", "DELETE") else "other"
        metrics.requests.labels(self.name, method, str(status)).inc()
        metrics.seconds.labels(self.name).observe(time.perf_counter() - self.started)
        if self.method == "GET" and status < 400:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "route": f"{method} {self.name}",
            "key": self.key.id if self.key else None,
            "source": None,
            "version": self.version,
            "outcome": status,
            **self.noted,
        }
        if self.key is None:
            left_out = self.middleware.refusals.take()
            if left_out is None:
                return
            line |= {"left_out": left_out} if left_out else {}
        audit.info("%s", json.dumps(line))


def takes_bytes(endpoint: Endpoint) -> Endpoint:
    """Declare that the body of requests to a route is a file, and not JSON."""
    endpoint.takes_bytes = True  # type: ignore[attr-defined]
    return endpoint


def wants_bytes(route: BaseRoute | None) -> bool:
    return bool(getattr(getattr(route, "endpoint", None), "takes_bytes", False))


def find_route(router: Router, scope: Scope) -> tuple[BaseRoute | None, set[str]]:
    """The route of a request; or a route that has its path for other methods, and these methods."""
    partial, methods = None, set[str]()
    for route in router.routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route, set()
        if match is Match.PARTIAL:
            partial = partial or route
            methods |= getattr(route, "methods", None) or set()
    return partial, methods


def json_problem(body: bytes, max_depth: int, max_values: int) -> str | None:
    """What speaks against parsing this as JSON, found without parsing it.

    Parsing holds the interpreter until it is done. This does not: the pattern calls back for every text, so
    that other threads get their turn. Each round of the loop removes the innermost pairs of brackets, in one
    pass at the speed of memory, however many there are.
    """
    outside = STRING.sub(_removed, body)
    values = sum(map(outside.count, (b",", b"[", b"{")))
    if values > max_values:
        return f"the body holds about {values:,} values; at most {max_values:,}: send less"
    brackets = outside.translate(BRACKETS, OTHERS)
    for _ in range(max_depth):
        if not brackets:
            return None
        brackets = brackets.replace(b"[]", b"")
    return f"the body is not JSON, or more than {max_depth} levels deep" if brackets else None


def _removed(text: re.Match[bytes]) -> bytes:
    return b""
