"""Models, completions and chats, as OpenAI's clients ask for them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from attractor.serve.decode.detokenize import CHATS
from attractor.serve.http.auth import needs
from attractor.serve.http.generation import Batch, Gone, Prompt, check_size, fit, path_of, unless_gone
from attractor.serve.http.metrics import Metrics
from attractor.serve.http.middleware import VERSION
from attractor.serve.http.replies import Problem, Reply, problem_of, to_json
from attractor.serve.http.schemas import ChatForm, CompletionForm, ErrorReply, Generation
from attractor.serve.http.settings import ServeSettings
from attractor.serve.http.shapes import ChatShape, CompletionShape, Shape
from attractor.serve.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One object, or with stream=true a stream of them",
        "content": {"text/event-stream": {}},
    },
    **ERRORS,
}


def add_openai_routes(app: FastAPI, service: Service, settings: ServeSettings, metrics: Metrics) -> None:
    started = int(time.time())
    chat_format = CHATS[settings.chat]

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "attractor"}

    @app.get("/v1/models", responses=ERRORS)
    @needs("generate")
    async def list_models() -> Reply:
        names = [service.name, *(f"{service.name}:{path}" for path in service.paths())]
        return Reply({"object": "list", "data": [described(name) for name in names]})

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
        return await answer(request, form, prompts, limit, form.stop or [], CompletionShape(form))

    @app.post("/v1/chat/completions", responses=STREAM)
    @needs("generate")
    async def chat(form: ChatForm, request: Request) -> Response:
        limit = form.max_completion_tokens or form.max_tokens
        limit = min(settings.default_max_tokens, settings.max_tokens) if limit is None else limit
        check_size(form, 1, limit, settings)
        messages = [(message.role, message.text) for message in form.messages]
        with blaming("messages"):
            text = chat_format.prompt(messages)
        prompts = await run_in_threadpool(read_prompts, service, settings, form, [text], "messages")
        stops = [*(form.stop or []), *chat_format.stops]
        return await answer(request, form, prompts, limit, stops, ChatShape(form))

    async def answer(
        request: Request, form: Generation, prompts: list[Prompt], limit: int, stops: Sequence[str],
        shape: Shape,
    ) -> Response:  # fmt: skip
        batch = Batch(service, metrics, form.model)
        try:
            try:
                batch.submit(form, prompts, limit, stops)
            except ValueError as error:
                raise problem_of(error) from error
            if form.stream:
                return await _stream(request, batch, shape)
            await unless_gone(request, _all(batch))
            versions = ",".join(str(version) for version in batch.versions)
            reply = shape.whole(batch)
            batch.done()
            return Reply(reply, headers={VERSION: versions})
        except Gone:
            batch.done()
            return Reply({}, 499)  # nobody reads it
        except BaseException:
            batch.done()
            raise


async def _all(batch: Batch) -> None:
    async for _ in batch.pieces():
        pass


async def _stream(request: Request, batch: Batch, shape: Shape) -> Response:
    """Begins when there is a first token, so that an error before it is an answer of its own."""
    pieces = batch.pieces()
    first = await unless_gone(request, anext(pieces))

    async def events() -> AsyncGenerator[str, None]:
        async with aclosing(pieces):
            try:
                for chunk in shape.chunks(*first):
                    yield event(chunk)
                async for choice, piece in pieces:
                    for chunk in shape.chunks(choice, piece):
                        yield event(chunk)
                if shape.wants_usage:
                    yield event(shape.frame(batch.versions, [], chunk=True) | {"usage": batch.usage})
            except Exception as error:
                yield event(problem_of(error).content)
        yield "data: [DONE]\n\n"

    return EventStream(batch, events(), headers={VERSION: str(first[0].version)})


def event(content: dict[str, Any]) -> str:
    return f"data: {to_json(content)}\n\n"


class EventStream(StreamingResponse):
    """Ends its texts when it ends, however it does."""

    media_type = "text/event-stream"

    def __init__(self, batch: Batch, content: AsyncGenerator[str, None], headers: dict[str, str]) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | headers)
        self._batch, self._content = batch, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._batch.done()
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
    service: Service, settings: ServeSettings, form: Generation, texts: Sequence[str], param: str
) -> list[Prompt]:
    with blaming(param):
        prompts = [Prompt(service.tokenizer.encode(text).tolist(), text) for text in texts]
    return fit(service, settings, prompts, form.truncate_prompt)


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """A ValueError in here is the fault of this parameter."""
    try:
        yield
    except ValueError as error:
        raise Problem(400, str(error), param=param) from error
