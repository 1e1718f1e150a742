"""The forms of requests. A parameter that the server cannot honour is refused by name."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from attractor.serve.http.replies import Problem
from attractor.serve.learning.asked import Said

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
    """What a lesson says: a text about a subject, or several forms of it."""

    subject: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    text: Text | None = Field(default=None, description="A sentence or a document; it needs a subject")
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
            raise Problem(422, "give either 'text' with a 'subject', or 'forms'", param="text")
        return self


class LessonsForm(LessonForm):
    """One lesson, or several."""

    lessons: List[LessonForm] | None = Field(default=None, min_length=1)
    source: Source = "default"
    require_known: bool = Field(
        default=False, description="Refuse a lesson of which not all forms are completed afterwards"
    )

    @model_validator(mode="after")
    def says_something(self) -> "LessonsForm":
        if sum(given is not None for given in (self.text, self.forms, self.lessons)) != 1:
            raise Problem(422, "give 'text' with a 'subject', or 'forms', or 'lessons'", param="text")
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
