"""The forms of requests and replies, and errors in the one shape that OpenAI's clients understand.

A parameter that the server cannot honour is refused by name.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from attractor.files import finite
from attractor.serve.errors import Busy, KeyReused, Refused, Unavailable
from attractor.serve.learning.catalogue import Said

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
MOST_FIELDS = 64
SOURCE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
KEY = r"^[!-~]{1,128}$"
REFUSED: dict[str, Callable[[Any], bool]] = {
    "audio": lambda value: False,
    "frequency_penalty": lambda value: value == 0,
    "function_call": lambda value: value == "none",
    "functions": lambda value: value == [],
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
    "prediction": lambda value: False,
    "presence_penalty": lambda value: value == 0,
    "response_format": lambda value: value == {"type": "text"},
    "suffix": lambda value: value == "",
    "tool_choice": lambda value: value == "none",
    "tools": lambda value: value == [],
    "top_logprobs": lambda value: value == 0 and not isinstance(value, bool),
    "web_search_options": lambda value: False,
}
"""For each parameter that is not supported: whether a value asks for nothing that is missing."""
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
            told, at_fault = error.figures, error.at_fault
            return Problem(409, str(error), code="lesson_refused", figures=told, at_fault=at_fault)
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
        detail = str(error.detail)
        if isinstance(error.__cause__, UnicodeDecodeError):
            detail = "the body is not JSON in UTF-8"
        return Problem(error.status_code, detail, headers=error.headers).reply()

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


def _unicode(text: str) -> str:
    text.encode()  # half a character, as JSON can write it, is a UnicodeEncodeError
    return text


def _one_of(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Element = TypeVar("Element")
List = Annotated[list[Element], Field(fail_fast=True)]
"""A list of which only the first error is reported: there may be as many as elements."""
Text = Annotated[str, AfterValidator(_unicode)]
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, AfterValidator(_unicode), Field(min_length=1, max_length=256)]
IdempotencyKey = Annotated[str, Field(pattern=KEY)]
Source = Annotated[str, Field(pattern=SOURCE)]


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def not_too_many(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and len(fields) > MOST_FIELDS:
            raise ValueError(f"{len(fields)} parameters; at most {MOST_FIELDS}")
        return fields


class Extension(Form):
    paths: bool = Field(default=False, description="Add the share of each path to every token")


class StreamOptions(Form):
    include_usage: bool = False
    include_obfuscation: Any = Field(default=None, description="Ignored")


class GenerationForm(Form):
    """The parameters that completions and chats have in common."""

    model: Text | None = Field(
        default=None,
        description="NAME, as if left out, is the whole model; NAME:base or NAME:SOURCE is one path of it",
    )
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1, le=1 << 31, description="Ours")
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Annotated[List[Stop], BeforeValidator(_one_of), Field(max_length=4)] | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt: bool = Field(
        default=False, description="Ours: keep only the end of a prompt that is too long"
    )
    attractor: Extension = Field(default_factory=Extension, description="Ours")
    user: Any = Field(default=None, description="Ignored")
    metadata: Any = Field(default=None, description="Ignored")
    store: Any = Field(default=None, description="Ignored")
    service_tier: Any = Field(default=None, description="Ignored")
    safety_identifier: Any = Field(default=None, description="Ignored")
    prompt_cache_key: Any = Field(default=None, description="Ignored")

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, harmless in REFUSED.items():
            if (value := fields.get(name)) is not None and not harmless(value):
                raise Problem(
                    400, f"{name!r} is not supported here: leave it out", param=name, code="unsupported"
                )
        return {name: value for name, value in fields.items() if name not in REFUSED}

    @model_validator(mode="after")
    def agree(self) -> "GenerationForm":
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "'stream_options' needs stream=true", param="stream_options")
        return self


class CompletionForm(GenerationForm):
    prompt: Text | List[Text] | List[Token] | List[List[Token]]
    echo: bool = False
    logprobs: int | None = Field(
        default=None, ge=0, description="Only 0 is supported: the log-probability of the chosen token"
    )
    best_of: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def supported(self) -> "CompletionForm":
        if self.logprobs:
            message = f"logprobs={self.logprobs}: only the logprobs of the chosen tokens are available; use 0"
            raise Problem(400, message, param="logprobs", code="unsupported")
        if self.echo and self.logprobs is not None:
            message = (
                "'echo' with 'logprobs' needs the logprobs of the prompt, which are not kept: leave one out"
            )
            raise Problem(400, message, param="echo", code="unsupported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Problem(400, "'best_of' other than n is not supported", param="best_of", code="unsupported")
        return self


class TextPart(Form):
    type: Literal["text"]
    text: Text


class Message(Form):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | List[TextPart]
    name: Any = Field(default=None, description="Ignored")
    refusal: Any = Field(default=None, description="Ignored")

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatForm(GenerationForm):
    messages: List[Message] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None


class LearnForm(Form):
    text: Text | None = None
    texts: List[Text] | None = Field(default=None, min_length=1)
    source: Source
    idempotency_key: IdempotencyKey | None = None

    @model_validator(mode="after")
    def one_of_both(self) -> "LearnForm":
        if (self.text is None) == (self.texts is None):
            raise Problem(422, "give either 'text' or 'texts'", param="text")
        return self


class PairForm(Form):
    """A question or the beginning of a sentence, and what is to follow it."""

    prompt: Text | None = None
    question: Text | None = None
    answer: Text


def pair_of(form: str | list[str] | PairForm) -> str | tuple[str, str]:
    if isinstance(form, PairForm):
        return form.prompt or form.question or "", form.answer
    return form if isinstance(form, str) else (form[0], form[1])


class LessonForm(Form):
    """What a lesson says: several forms of it, or a text, which is a lesson for each thing it is about."""

    subject: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    text: Text | None = Field(default=None, description="A sentence or a document")
    forms: List[Text | Annotated[List[Text], Field(min_length=2, max_length=2)] | PairForm] | None = Field(
        default=None, min_length=1, description='Sentences, ["PROMPT", "ANSWER"], or {"question", "answer"}'
    )
    idempotency_key: IdempotencyKey | None = None

    @property
    def said(self) -> Said:
        forms = None if self.forms is None else [pair_of(form) for form in self.forms]
        return Said(self.text, forms, self.subject)

    @model_validator(mode="after")
    def says_something(self) -> "LessonForm":
        if (self.text is None) == (self.forms is None):
            raise Problem(422, "give either 'text' or 'forms'", param="text")
        return self


class RevisionForm(LessonForm):
    require_known: bool = Field(
        default=True,
        description="Take a lesson back of which not all forms are completed afterwards; else it is kept",
    )


class LessonsForm(RevisionForm):
    """One lesson, or several."""

    lessons: List[LessonForm] | None = Field(default=None, min_length=1)
    source: Source = "default"

    @model_validator(mode="after")
    def says_something(self) -> "LessonsForm":
        if sum(given is not None for given in (self.text, self.forms, self.lessons)) != 1:
            raise Problem(422, "give 'text', 'forms' or 'lessons'", param="text")
        if self.lessons and any(lesson.idempotency_key for lesson in self.lessons):
            raise Problem(422, "a key is for the whole request: give it beside 'lessons'", param="lessons")
        return self


class RollbackForm(Form):
    version: int = Field(ge=0, lt=1 << 63)
    idempotency_key: IdempotencyKey | None = None


class ErrorContent(BaseModel):
    model_config = ConfigDict(extra="allow")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorContent


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
}
"""The errors of a route, as its description in OpenAPI has them."""
