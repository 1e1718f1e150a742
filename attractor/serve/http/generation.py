"""The texts of a request: from its form to jobs, and from their streams to pieces of text."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from attractor.serve.config import ServeSettings
from attractor.serve.decode.engine import Job, Pin
from attractor.serve.decode.sequences import Touch
from attractor.serve.decode.stream import Piece, Stream, TextDecoder, TokenText
from attractor.serve.http.schemas import GenerationForm, Problem, problem_of
from attractor.serve.http.status import Metrics
from attractor.serve.service import Service

Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str | None = None  # to be repeated before the answer


class Disconnected(Exception):
    """The client has disconnected."""


class Choice:
    """One of the texts of a request."""

    def __init__(self, index: int, prompt: Prompt, stream: Stream, decoder: TextDecoder) -> None:
        self.index, self.prompt, self.stream, self.decoder = index, prompt, stream, decoder
        self.text, self.tokens = "", list[TokenText]()
        self.written: list[int] = []
        self.touched: list[Touch] = []  # by which lessons, as far as the text goes
        self.reason: str | None = None

    @property
    def version(self) -> int:
        return self.stream.version or 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """What to send, piece by piece. Afterwards `reason` says why the text ended."""
        async for token in self.stream:
            self.written.append(token.token)
            self.touched += token.touched
            yield self._keep(self.decoder.push(token))
            if self.decoder.stopped:
                self.stream.cancel()
                self.reason = "stop"
                return
        if self.stream.finish not in ("stop", "length"):
            raise self._failure()
        self.touched += self.stream.touched
        rest = self._keep(self.decoder.finish())
        self.reason = "stop" if self.decoder.stopped else self.stream.finish
        yield rest

    def lessons(self, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """The lessons that acted on the text, each with the tokens of prompt and text that it acted on."""
        found: dict[int, dict[int, float]] = {}
        for touch in self.touched:  # a token may have been read twice
            own = found.setdefault(touch.lesson, {})
            own[touch.index] = max(touch.weight, own.get(touch.index, 0.0))
        prompt = self.prompt.tokens
        tokens, first = [*prompt, *self.written], len(prompt)
        return [
            {
                "lesson": lesson,
                "tokens": [
                    {
                        "part": "prompt" if index < first else "text",
                        "index": index if index < first else index - first,
                        "text": decode([tokens[index]]),
                        "weight": weight,
                    }
                    for index, weight in sorted(own.items())
                ],
            }
            for lesson, own in sorted(found.items())
        ]

    def _keep(self, piece: Piece) -> Piece:
        self.text += piece.text
        self.tokens += piece.tokens
        return piece

    def _failure(self) -> Problem:
        if self.stream.finish == "cancelled":
            return Problem(503, "the server stopped writing this: it is closing", code="cancelled")
        return problem_of(RuntimeError(self.stream.message or "a generation failed"))


@dataclass
class Generation:
    """All texts of a request."""

    service: Service
    metrics: Metrics
    model: str | None
    choices: list[Choice] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def submit(
        self, form: GenerationForm, prompts: Sequence[Prompt], max_tokens: int, stops: Sequence[str]
    ) -> None:
        path = path_of(self.service, self.model)
        each, pin = form.n or 1, Pin()
        try:
            for index in range(len(prompts) * each):
                prompt = prompts[index // each]
                job = Job(
                    prompt=prompt.tokens,
                    max_tokens=max_tokens,
                    path=path,
                    top_k=form.top_k,
                    top_p=form.top_p,
                    temperature=1.0 if form.temperature is None else form.temperature,
                    seed=None if form.seed is None else (form.seed + index) % (1 << 63),
                    stop_tokens=self.service.stop_tokens,
                )
                stream = self.service.submit(job, pin)
                decoder = TextDecoder(self.service.tokenizer, stops)
                self.choices.append(Choice(index, prompt, stream, decoder))
        except BaseException:
            self.cancel()
            raise
        self.metrics.prompt_tokens.inc(self.prompt_tokens)

    def cancel(self) -> None:
        for choice in self.choices:
            if choice.reason is None:
                choice.stream.cancel()

    def done(self) -> None:
        """Count the request, and cancel what is not finished. This must be called however a request ends."""
        self.cancel()
        self.metrics.written_tokens.inc(self.written_tokens)
        for choice in self.choices:
            self.metrics.finished.labels(choice.reason or "cut").inc()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in {id(c.prompt): c.prompt for c in self.choices}.values())

    @property
    def written_tokens(self) -> int:
        return sum(choice.decoder.count for choice in self.choices)

    @property
    def usage(self) -> dict[str, int]:
        read, written = self.prompt_tokens, self.written_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    @property
    def versions(self) -> list[int]:
        return sorted({choice.version for choice in self.choices})

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece | None], None]:
        """Pieces of all choices as they come, and None when a choice is finished."""
        queue: asyncio.Queue[tuple[Choice, Piece | Exception | None]] = asyncio.Queue()

        async def follow(choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    queue.put_nowait((choice, piece))
                queue.put_nowait((choice, None))
            except Exception as error:
                queue.put_nowait((choice, error))

        tasks = [asyncio.create_task(follow(choice)) for choice in self.choices]
        try:
            open_ones, first = len(tasks), True
            while open_ones:
                choice, piece = await queue.get()
                if isinstance(piece, Exception):
                    path_of(self.service, self.model)  # a path may have been forgotten while it waited
                    raise piece
                if first:
                    self.metrics.first_token.observe(time.perf_counter() - self.started)
                    first = False
                open_ones -= piece is None
                yield choice, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def names_of(service: Service) -> list[str]:
    """What a request may give as its model: all of it, and each path."""
    return [service.name, *(f"{service.name}:{path}" for path in service.paths())]


def path_of(service: Service, model: str | None) -> str | None:
    """The path that the name of a model stands for; None is the mixture, also where no model is named."""
    if model is None or model == service.name:
        return None
    path = model.removeprefix(f"{service.name}:")
    if path == model or path not in service.paths():
        known = ", ".join(names_of(service))
        message = f"there is no model {model[:200]!r}: leave it out, or give one of {known[:1000]}"
        raise Problem(404, message, param="model", code="model_not_found")
    return path


def check_size(form: GenerationForm, prompts: int, max_tokens: int, settings: ServeSettings) -> None:
    choices = prompts * (form.n or 1)
    if choices > settings.max_choices:
        message = f"{choices} texts were asked for (prompts times n); at most {settings.max_choices}"
        raise Problem(400, message, param="n")
    if max_tokens > settings.max_tokens:
        message = f"{max_tokens} tokens were asked for; at most {settings.max_tokens}"
        raise Problem(400, message, param="max_tokens")


def fit(service: Service, settings: ServeSettings, prompts: list[Prompt], truncate: bool) -> list[Prompt]:
    """The prompts, cut to the context where this was asked for."""
    total = sum(len(prompt.tokens) for prompt in prompts)
    if total > settings.max_prompt_tokens:
        message = f"the prompts have {total} tokens; at most {settings.max_prompt_tokens}"
        raise Problem(400, message, param="prompt", code="context_length_exceeded")
    for prompt in prompts:
        if not prompt.tokens:
            raise Problem(400, "a prompt is empty: it needs at least one token", param="prompt")
        if len(prompt.tokens) > service.context and not truncate:
            message = (
                f"a prompt has {len(prompt.tokens)} tokens, and the context {service.context}: shorten it, "
                "or send truncate_prompt=true to keep only its end"
            )
            raise Problem(400, message, param="prompt", code="context_length_exceeded")
        if max(prompt.tokens) >= service.vocab_size:
            raise Problem(400, f"a token is not below the vocabulary's {service.vocab_size}", param="prompt")
    return [Prompt(prompt.tokens[-service.context :], prompt.text) for prompt in prompts]


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, which is cancelled when the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
