"""What every request passes before a route sees it, and what is noted when it is answered.

In this order: may it come in, is its body small enough and here in time, is its JSON shallow. Whoever may not
come in does not get to send a body. Afterwards a line of JSON goes to the logger "attractor.audit" for all
that changes or writes something, and for all that was turned away: never any text.
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
from attractor.serve.http.replies import Problem, problem_of
from attractor.serve.http.settings import ServeSettings
from attractor.serve.service import Service

VERSION = "X-Attractor-Version"
# No script but ours, and no eval. plotly.js fills an empty <style> by script and sets style attributes; its
# style sheet for maps, which nobody draws here, is stopped, and the browser's console says so.
EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", f"style-src 'self' {EMPTY}",
        "style-src-attr 'unsafe-inline'", "connect-src 'self'", "img-src 'self' data:", "base-uri 'none'",
        "form-action 'none'", "frame-ancestors 'none'",
    ]
)  # fmt: skip
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


class Gate:
    def __init__(
        self, app: ASGIApp, *, router: Router, service: Service, settings: ServeSettings,
        keys: KeyRing | None, metrics: Metrics,
    ) -> None:  # fmt: skip
        self.app, self.router, self.service, self.settings = app, router, service, settings
        self.keys, self.metrics = keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there are no websockets here
            return await send({"type": "websocket.close", "code": 1008})
        passage = Passage(self, scope, receive, send)
        with self.metrics.in_flight.track_inprogress():
            await passage.run()


class Passage:
    """One request's way through the gate."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate, self.scope, self._receive, self._send = gate, scope, receive, send
        self.headers, self.method = Headers(scope=scope), scope["method"]
        self.route = find_route(gate.router, scope)
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
            self._let_in()
            await self._read()
            await self.gate.app(self.scope, self.receive, self.send)
        except Exception as error:
            if self.status is not None:  # the beginning of an answer is out: cutting it is all that is left
                raise
            await problem_of(error).reply()(self.scope, self.receive, self.send)
        finally:
            self._note()

    def _let_in(self) -> None:
        scopes, keys = declared(self.route), self.gate.keys
        if keys is None:
            if problem := local_problem(self.method, self.headers):
                raise Problem(403, problem, code="not_local")
            self.key = LOCAL
        else:
            self.key = keys.find(self.headers.get("authorization"))
        if self.route is None or scopes == frozenset():
            return  # nothing there, or open
        if self.key is None:
            raise Problem(
                401, "this needs a key: send the header Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        if scopes is None or not scopes & self.key.scopes:
            wanted = " or ".join(sorted(scopes or ["(nobody's)"]))
            raise Problem(403, f"this key may not do that: it needs the scope {wanted}", code="missing_scope")

    async def _read(self) -> None:
        """The whole body, so that no route waits for a slow one or holds a large one."""
        if self.method in ("GET", "HEAD", "OPTIONS"):
            return
        limit, seconds = self.gate.settings.max_body, self.gate.settings.body_timeout
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
                        raise Problem(400, "the client left before its request was here")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Problem(408, f"the body was not here after {seconds:g} seconds", code="timeout") from None
        self._check(body)
        self.body = bytes(body)

    def _check(self, body: bytearray) -> None:
        if not body:
            return
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a form of another site could send as well is not taken
            raise Problem(415, "the body must be JSON, with Content-Type: application/json")
        if too_deep(body, self.gate.settings.max_depth):
            raise Problem(
                400, f"the body is not JSON, or more than {self.gate.settings.max_depth} levels deep"
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
            headers.setdefault(VERSION, str(self.gate.service.version))
            self.version = headers[VERSION]
        await self._send(message)

    def _note(self) -> None:
        status, metrics = self.status or 499, self.gate.metrics  # 499: nobody was there to be answered
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
    """The route that will answer, or that has this path and would for another method."""
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

    Each round takes the innermost pairs away: a few passes at the speed of memory, however many there are.
    """
    brackets = STRING.sub(b"", body).translate(BRACKETS, OTHERS)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
