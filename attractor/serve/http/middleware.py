"""The checks that every request passes before a route sees it, and the record of its reply.

The checks are, in this order: the key and its scopes, the size of the body and the time it takes, and the
depth of its JSON. The body of a request that is refused by its key is never read. Afterwards one line of JSON
goes to the logger "attractor.audit" for every request that changes or generates something, and for every
refusal. It never holds any text.
"""

import asyncio
import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attractor.serve.http.auth import LOCAL, Key, KeyRing, declared, local_problem
from attractor.serve.http.metrics import Metrics
from attractor.serve.http.replies import VERSION, Problem, problem_of
from attractor.serve.http.settings import ServeSettings
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

audit = logging.getLogger("attractor.audit")


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
        self.route = find_route(middleware.router, scope)
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

    async def _read(self) -> None:
        """Read the whole body, so that no route waits for a slow one or holds a large one."""
        if self.method in ("GET", "HEAD", "OPTIONS"):
            return
        limit, seconds = self.middleware.settings.max_body, self.middleware.settings.body_timeout
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
            raise Problem(
                408, f"the body did not arrive within {seconds:g} seconds", code="timeout"
            ) from None
        self._check(body)
        self.body = bytes(body)

    def _check(self, body: bytearray) -> None:
        if not body:
            return
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a form on a page of another site cannot send this type
            raise Problem(415, "the body must be JSON, with Content-Type: application/json")
        if too_deep(body, self.middleware.settings.max_depth):
            raise Problem(
                400, f"the body is not JSON, or more than {self.middleware.settings.max_depth} levels deep"
            )

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
            headers.setdefault(VERSION, str(self.middleware.service.version))
            self.version = headers[VERSION]
        await self._send(message)

    def _note(self) -> None:
        status, metrics = self.status or 499, self.middleware.metrics  # 499: the client had disconnected
        method = self.method if self.method in ("GET", "POST", "DELETE") else "other"
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
        audit.info("%s", json.dumps(line))


def find_route(router: Router, scope: Scope) -> BaseRoute | None:
    """The route of a request, or a route that has its path for another method."""
    partial = None
    for route in router.routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        if match is Match.PARTIAL and partial is None:
            partial = route
    return partial


def too_deep(body: bytes | bytearray, limit: int) -> bool:
    """Whether brackets outside strings are nested deeper than this, or do not match.

    Each round removes the innermost pairs, in one pass at the speed of memory, however many there are.
    """
    brackets = STRING.sub(b"", body).translate(BRACKETS, OTHERS)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
