"""Replies as JSON, and errors in the one shape that OpenAI's clients understand."""

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from attractor.files import finite
from attractor.serve.errors import Busy, KeyReused, Refused, Unavailable

VERSION = "X-Attractor-Version"
LESSONS = "X-Attractor-Lessons"
"""The lessons that acted on a text, or "untouched" where none did."""
PATH = re.compile(r"""(?<![\w:/.<])(?:~|\.{0,2})/[^\s'",;:)]+""")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "refused",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable",
}
log = logging.getLogger("attractor")


class Reply(JSONResponse):
    """A reply in ASCII, whatever its texts hold; numbers that JSON does not know become null."""

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def to_json(content: Any) -> str:
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":"))


class Problem(Exception):
    """An error that is sent as a reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.more = dict(headers or {}), more

    @property
    def content(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = without_paths(self.message)
        return {
            "error": {"message": message, "type": kind, "param": self.param, "code": self.code, **self.more}
        }

    def reply(self) -> Reply:
        return Reply(self.content, self.status, self.headers)


def without_paths(message: str) -> str:
    """The message without the names of the server's files, which clients must not see."""
    return PATH.sub("(a path)", message)


def problem_of(error: Exception, *, wrong: int = 400) -> Problem:
    """The reply to an error that a part of the server raised; `wrong` is the status of a ValueError."""
    match error:
        case Problem():
            return error
        case Busy():
            wait = max(1, math.ceil(error.retry_after)) if math.isfinite(error.retry_after) else 1
            return Problem(429, str(error), code="busy", headers={"Retry-After": str(wait)})
        case Refused():
            return Problem(409, str(error), code="lesson_refused", figures=error.figures)
        case Unavailable():
            return Problem(503, str(error), code="learning_unavailable")
        case KeyReused():
            return Problem(422, str(error), param="idempotency_key", code="idempotency_key_reused")
        case ValueError():
            return Problem(wrong, str(error))
    log.error("a request failed", exc_info=error)
    return Problem(500, "the server failed to do this; its log says why", code="internal_error")


def add_error_replies(app: FastAPI) -> None:
    """Answer every error of a route in the same form."""

    async def explain(request: Request, error: Exception) -> Reply:
        return problem_of(error).reply()

    async def explain_http(request: Request, error: Exception) -> Reply:
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, str(error.detail), headers=error.headers).reply()

    async def explain_form(request: Request, error: Exception) -> Reply:
        assert isinstance(error, RequestValidationError)
        openai = request.url.path.endswith("/completions")
        return _form_problem(error, 400 if openai else 422).reply()

    for kind in (Problem, Busy, Refused, Unavailable):
        app.add_exception_handler(kind, explain)
    app.add_exception_handler(HTTPException, explain_http)
    app.add_exception_handler(RequestValidationError, explain_form)


def _form_problem(error: RequestValidationError, status: int) -> Problem:
    """The first thing that is wrong. The value is not repeated, because it may be long, or secret."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Problem(status, "the body is not JSON")
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = where[0] if where else None
    if first["type"] == "extra_forbidden":
        return Problem(status, f"{param!r} is not a parameter of this server", param=param, code="unknown")
    if first["type"] == "missing":
        return Problem(status, f"{param!r} is missing" if param else "the body is missing", param=param)
    others = {each["msg"] for each in error.errors() if each["loc"][:2] == first["loc"][:2]}
    message = "; ".join(sorted(others))
    return Problem(status, f"{'.'.join(where[:1])}: {message}" if where else message, param=param)
