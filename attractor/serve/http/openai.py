"""Models, completions and chats, as OpenAI's clients ask for them and read the replies."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from attractor.serve.config import ChatName, ServeSettings
from attractor.serve.decode.stream import Piece, TokenText
from attractor.serve.http.auth import needs
from attractor.serve.http.generation import (
    Choice,
    Disconnected,
    Generation,
    Prompt,
    check_size,
    fit,
    names_of,
    path_of,
    while_connected,
)
from attractor.serve.http.schemas import (
    ERRORS,
    LESSONS,
    VERSION,
    ChatForm,
    CompletionForm,
    GenerationForm,
    Problem,
    Reply,
    problem_of,
    to_json,
)
from attractor.serve.http.status import Metrics
from attractor.serve.service import Service

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One object, or with stream=true a stream of them",
        "content": {"text/event-stream": {}},
    },
    **ERRORS,
}


# --- chats


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become one text. `stops` end an answer, and `marks` may not occur in a message."""

    turns: Mapping[str, tuple[str, str]]  # role -> what stands before and after a message
    answer: str
    stops: tuple[str, ...]
    marks: tuple[str, ...] = ()

    def prompt(self, messages: Sequence[tuple[str, str]]) -> str:
        parts = []
        for role, content in messages:
            check_marks(content, self.marks)
            before, after = self.turns["system" if role == "developer" else role]
            parts.append(before + content + after)
        return "".join(parts) + self.answer


CHAT_TEMPLATES: Mapping[str, ChatTemplate] = MappingProxyType(
    {
        "transcript": ChatTemplate(
            {"system": ("", "\n\n"), "user": ("User: ", "\n"), "assistant": ("Assistant: ", "\n")},
            "Assistant:",
            ("\nUser:", "\nAssistant:"),
        ),
        "questions": ChatTemplate(  # as `LanguageModel.chat` asks, and as lessons are learned
            {"system": ("", "\n\n"), "user": ("Question: ", "\n"), "assistant": ("Answer: ", "\n\n")},
            "Answer:",
            ("\nQuestion:", "\nAnswer:"),
        ),
        "chatml": ChatTemplate(
            {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")},
            "<|im_start|>assistant\n",
            ("<|im_end|>", "<|im_start|>"),
            ("<|im_end|>", "<|im_start|>"),
        ),
    }
)


class OwnTemplate:
    """How the model was trained to chat, by its tokenizer. Its own marks may not occur in a message."""

    stops: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._chat = tokenizer.chat
        library = getattr(tokenizer, "_tokenizer", None)
        added = {} if library is None else library.get_added_tokens_decoder()
        self.marks = tuple(token.content for token in added.values() if token.special)

    def prompt(self, messages: Sequence[tuple[str, str]]) -> str:
        for _, content in messages:
            check_marks(content, self.marks)
        said = [
            {"role": "system" if role == "developer" else role, "content": content}
            for role, content in messages
        ]
        try:
            return str(self._chat(said))
        except Exception as error:  # of a template that came with the model
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error


def check_marks(content: str, marks: Sequence[str]) -> None:
    if found := [mark for mark in marks if mark in content]:
        raise ValueError(f"a message contains {found[0]!r}, which divides messages: leave it out")


def chat_template(
    name: ChatName | None, tokenizer: Any, usual: ChatName = "transcript"
) -> ChatTemplate | OwnTemplate:
    """The one that was asked for, or else the model's own, or else the `usual` one."""
    has_own = getattr(tokenizer, "chat", None) is not None
    if name == "model" and not has_own:
        raise ValueError(
            'chat="model": this model was not trained to chat; choose questions, transcript or chatml'
        )
    if name in (None, "model") and has_own:
        return OwnTemplate(tokenizer)
    return CHAT_TEMPLATES[name or usual]


# --- replies


class ReplyFormat:
    """How the texts of a request are written in its reply: whole or in chunks."""

    kind: str
    prefix: str
    chunk_kind: str

    def __init__(self, form: GenerationForm, service: Service) -> None:
        self.form = form
        self.model = service.name if form.model is None else form.model
        # where lessons are taught, every text says which of them acted
        self._decode = service.tokenizer.decode if service.teaches == "lessons" else None
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._opened: set[int] = set()
        self.wants_usage = form.stream_options is not None and form.stream_options.include_usage

    def frame(self, versions: Sequence[int], choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_kind if chunk else self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": ",".join(f"v{version}" for version in versions),
            "choices": choices,
        }

    def whole(self, texts: Generation) -> dict[str, Any]:
        choices = [
            self.choice(choice) | self.extension(choice, choice.tokens, is_whole=True)
            for choice in texts.choices
        ]
        return self.frame(texts.versions, choices, chunk=False) | {"usage": texts.usage}

    def chunks(self, choice: Choice, piece: Piece | None) -> list[dict[str, Any]]:
        opening = None if choice.index in self._opened else self.opening(choice)
        self._opened.add(choice.index)
        worth_it = piece is None or piece.text or piece.tokens
        return ([] if opening is None else [opening]) + ([self.chunk(choice, piece)] if worth_it else [])

    def chunk(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        tokens = [] if piece is None else piece.tokens
        part = self.part(choice, piece) | self.extension(choice, tokens, is_whole=piece is None)
        return self.frame([choice.version], [part], chunk=True)

    def extension(self, choice: Choice, tokens: Sequence[TokenText], *, is_whole: bool) -> dict[str, Any]:
        """Ours: the version, and of a whole text the lessons that acted on it."""
        ours: dict[str, Any] = {"version": choice.version}
        if is_whole and self._decode is not None:
            ours |= {"untouched": not choice.touched, "lessons": choice.lessons(self._decode)}
        if self.form.attractor.paths:
            ours["tokens"] = [{"text": each.text, "shares": each.generated.shares} for each in tokens]
        return {"attractor": ours}

    def headers(self, texts: Generation) -> dict[str, str]:
        """The same in short, for replies that are no streams."""
        headers = {VERSION: ",".join(str(version) for version in texts.versions)}
        if self._decode is not None:
            acted = sorted({touch.lesson for choice in texts.choices for touch in choice.touched})
            headers[LESSONS] = ",".join(map(str, acted)) or "untouched"
        return headers

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk that goes before the first text of a choice, if there is one."""
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        raise NotImplementedError


class CompletionReplyFormat(ReplyFormat):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    form: CompletionForm

    def _part(
        self, index: int, text: str, reason: str | None, tokens: Sequence[TokenText], start: int = 0
    ) -> dict[str, Any]:
        logprobs = None
        if self.form.logprobs is not None:
            offsets, at = [], start
            for each in tokens:
                offsets.append(at)
                at += len(each.text)
            logprobs = {
                "tokens": [each.text for each in tokens],
                "token_logprobs": [each.generated.logprob for each in tokens],
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self.form.echo:
            return None
        part = self._part(choice.index, choice.prompt.text or "", None, [])
        return self.frame([choice.version], [part], chunk=True)

    def choice(self, choice: Choice) -> dict[str, Any]:
        prompt = (choice.prompt.text or "") if self.form.echo else ""
        return self._part(choice.index, prompt + choice.text, choice.reason, choice.tokens)

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return self._part(choice.index, "", choice.reason, [])
        before = len(choice.text) - sum(len(each.text) for each in piece.tokens)
        return self._part(choice.index, piece.text, None, piece.tokens, max(0, before))


class ChatReplyFormat(ReplyFormat):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    form: ChatForm

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self.form.logprobs:
            return None
        content = [
            {
                "token": each.text,
                "logprob": each.generated.logprob,
                "bytes": list(each.text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self.frame([choice.version], [part], chunk=True)

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.reason,
            "logprobs": self._logprobs(choice.tokens),
        }

    def part(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"index": choice.index, "delta": {}, "finish_reason": choice.reason, "logprobs": None}
        return {
            "index": choice.index,
            "delta": {"content": piece.text},
            "finish_reason": None,
            "logprobs": self._logprobs(piece.tokens),
        }


# --- routes


def add_openai_routes(app: FastAPI, service: Service, settings: ServeSettings, metrics: Metrics) -> None:
    started = int(time.time())
    usual: ChatName = "questions" if service.teaches == "lessons" else "transcript"
    template = chat_template(settings.chat, service.tokenizer, usual)

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "attractor"}

    @app.get("/v1/models", responses=ERRORS)
    @needs("generate")
    async def list_models() -> Reply:
        return Reply({"object": "list", "data": [described(name) for name in names_of(service)]})

    @app.get("/v1/models/{model:path}", responses=ERRORS)
    @needs("generate")
    async def retrieve_model(model: str) -> Reply:
        path_of(service, model)
        return Reply(described(model))

    @app.post("/v1/completions", responses=STREAM)
    @needs("generate")
    async def complete(form: CompletionForm, request: Request) -> Response:
        limit = form.max_tokens or 16
        check_size(form, number_of_prompts(form), limit, settings)
        prompts = await run_in_threadpool(completion_prompts, service, settings, form)
        return await answer(
            request, form, prompts, limit, form.stop or [], CompletionReplyFormat(form, service)
        )

    @app.post("/v1/chat/completions", responses=STREAM)
    @needs("generate")
    async def chat(form: ChatForm, request: Request) -> Response:
        limit = form.max_completion_tokens or form.max_tokens
        limit = min(settings.default_max_tokens, settings.max_tokens) if limit is None else limit
        check_size(form, 1, limit, settings)
        messages = [(message.role, message.text) for message in form.messages]
        with blaming("messages"):
            text = template.prompt(messages)
        prompts = await run_in_threadpool(read_prompts, service, settings, form, [text], "messages")
        stops = [*(form.stop or []), *template.stops]
        return await answer(request, form, prompts, limit, stops, ChatReplyFormat(form, service))

    async def answer(
        request: Request,
        form: GenerationForm,
        prompts: list[Prompt],
        limit: int,
        stops: Sequence[str],
        reply_format: ReplyFormat,
    ) -> Response:
        texts = Generation(service, metrics, form.model)
        try:
            try:
                texts.submit(form, prompts, limit, stops)
            except ValueError as error:
                raise problem_of(error) from error
            if form.stream:
                return await _stream(request, texts, reply_format)
            await while_connected(request, _all(texts))
            reply, headers = reply_format.whole(texts), reply_format.headers(texts)
            texts.done()
            return Reply(reply, headers=headers)
        except Disconnected:
            texts.done()
            return Reply({}, 499)  # there is no client any more
        except BaseException:
            texts.done()
            raise


async def _all(texts: Generation) -> None:
    async for _ in texts.pieces():
        pass


async def _stream(request: Request, texts: Generation, reply_format: ReplyFormat) -> Response:
    """Begin the reply with the first token, so that an error before it is a reply of its own."""
    pieces = texts.pieces()
    first = await while_connected(request, anext(pieces))

    async def events() -> AsyncGenerator[str, None]:
        async with aclosing(pieces):
            try:
                for chunk in reply_format.chunks(*first):
                    yield event(chunk)
                async for choice, piece in pieces:
                    for chunk in reply_format.chunks(choice, piece):
                        yield event(chunk)
                if reply_format.wants_usage:
                    yield event(reply_format.frame(texts.versions, [], chunk=True) | {"usage": texts.usage})
            except Exception as error:
                yield event(problem_of(error).content)
        yield "data: [DONE]\n\n"

    return EventStream(texts, events(), headers={VERSION: str(first[0].version)})


def event(content: dict[str, Any]) -> str:
    return f"data: {to_json(content)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events that ends the texts of its request when it ends, however it does."""

    media_type = "text/event-stream"

    def __init__(
        self, texts: Generation, content: AsyncGenerator[str, None], headers: dict[str, str]
    ) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | headers)
        self._texts, self._content = texts, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._texts.done()
            await asyncio.shield(self._content.aclose())


# --- prompts


def number_of_prompts(form: CompletionForm) -> int:
    prompt = form.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def completion_prompts(service: Service, settings: ServeSettings, form: CompletionForm) -> list[Prompt]:
    given = form.prompt
    if isinstance(given, str) or (given and isinstance(given[0], str)):
        texts = [given] if isinstance(given, str) else [str(each) for each in given]
        return read_prompts(service, settings, form, texts, "prompt")
    rows: Any = given if given and isinstance(given[0], list) else [given]
    prompts = fit(service, settings, [Prompt(row) for row in rows], form.truncate_prompt)
    if not form.echo:
        return prompts
    with blaming("prompt"):
        return [Prompt(each.tokens, service.tokenizer.decode(each.tokens)) for each in prompts]


def read_prompts(
    service: Service, settings: ServeSettings, form: GenerationForm, texts: Sequence[str], param: str
) -> list[Prompt]:
    characters = sum(map(len, texts))
    if characters > settings.max_prompt_characters:
        message = f"the prompts have {characters:,} characters; at most {settings.max_prompt_characters:,}"
        raise Problem(400, message, param=param, code="context_length_exceeded")
    with blaming(param):
        prompts = [Prompt(service.tokenizer.encode(text).tolist(), text) for text in texts]
    return fit(service, settings, prompts, form.truncate_prompt)


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Turn a ValueError of this block into an error about this parameter."""
    try:
        yield
    except ValueError as error:
        raise Problem(400, str(error), param=param) from error
