"""The routes that teach, list versions, and take lessons back."""

import asyncio
from typing import Annotated, Any

from anyio import to_thread
from fastapi import FastAPI, Path, Query, Request

from attractor.serve.http.auth import FIGURES, Key, needs
from attractor.serve.http.generation import Disconnected, while_connected
from attractor.serve.http.metrics import Metrics
from attractor.serve.http.openai import ERRORS
from attractor.serve.http.replies import VERSION, Problem, Reply, problem_of
from attractor.serve.http.schemas import SOURCE, LearnForm, RollbackForm
from attractor.serve.http.settings import ServeSettings
from attractor.serve.service import Service, Verb

LEARN_ERRORS: dict[int | str, dict[str, Any]] = {**ERRORS, 409: ERRORS[400]}
NUMBER = Query(ge=1, lt=1 << 63)


def add_lesson_routes(app: FastAPI, service: Service, settings: ServeSettings, metrics: Metrics) -> None:
    async def change(request: Request, verb: Verb, *arguments: Any, source: str | None = None) -> Reply:
        """Make a change, and reply when it is durable.

        A lesson that waits is dropped when its client disconnects. What has begun goes on, and so does all
        that takes lessons back.
        """
        request.state.audit["source"] = source
        try:
            done = asyncio.wrap_future(service.begin(verb, *arguments))
            answer = await (while_connected(request, done) if verb == "learn" else done)
        except LookupError as error:
            if isinstance(error, KeyError | IndexError) and not error.args:
                raise
            raise Problem(404, str(error.args[0]), code="unknown_source") from error
        except ValueError as error:
            raise problem_of(error, wrong=422) from error
        return Reply(answer, headers={VERSION: str(answer["version"])})

    @app.post("/v1/learn", responses=LEARN_ERRORS)
    @needs("learn")
    async def learn(form: LearnForm, request: Request) -> Reply:
        """Learn a text, or several in order. The reply comes when the change is durable and in use."""
        if not service.learning:
            raise Problem(409, "this server does not learn: start it with --learn", code="not_learning")
        texts = [form.text] if form.text is not None else form.texts or []
        if len(texts) > settings.max_texts:
            raise Problem(422, f"{len(texts)} texts; at most {settings.max_texts}", param="texts")
        try:
            key = senders_key(request, form.idempotency_key)
            reply = await change(request, "learn", texts, form.source, key, source=form.source)
        except Disconnected:
            metrics.lessons.labels("disconnected").inc()
            return Reply({}, 499)  # there is no client any more
        except Exception as error:
            metrics.lessons.labels(type(error).__name__.lower()).inc()
            raise
        metrics.lessons.labels("learned").inc()
        return reply

    @app.post("/v1/rollback", responses=LEARN_ERRORS)
    @needs("admin")
    async def rollback(form: RollbackForm, request: Request) -> Reply:
        """Make a new version in which everything is as it was at an earlier one."""
        request.state.audit["to"] = form.version
        key = senders_key(request, form.idempotency_key)
        return await change(request, "rollback", form.version, key)

    @app.delete("/v1/sources/{source}", responses=LEARN_ERRORS)
    @needs("admin")
    async def forget(
        source: Annotated[str, Path(pattern=SOURCE)],
        request: Request,
        idempotency_key: Annotated[str | None, Query(pattern=r"^[!-~]{1,128}$")] = None,
        erase: bool = False,
    ) -> Reply:
        """Forget everything that a source taught; with `erase` no rollback can bring it back."""
        request.state.audit["erase"] = erase
        key = senders_key(request, idempotency_key)
        return await change(request, "forget", source, key, None, erase, source=source)

    @app.get("/v1/versions", responses=ERRORS)
    @needs(*FIGURES)
    async def versions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 50, before: Annotated[int | None, NUMBER] = None
    ) -> Reply:
        """List what made each version, the newest first."""
        version = service.version
        lines = await to_thread.run_sync(service.versions, limit, before)
        return Reply({"object": "list", "version": version, "data": lines})

    @app.get("/v1/overlays", responses=ERRORS)
    @needs(*FIGURES)
    async def overlays() -> Reply:
        """Describe what is kept of each source."""
        version = service.version
        return Reply({"version": version, "overlays": await to_thread.run_sync(service.overlays)})


def senders_key(request: Request, idempotency_key: str | None) -> str | None:
    """An idempotency key as the service gets it: the same key of another sender is another key."""
    sender: Key = request.state.key
    return None if idempotency_key is None else f"{sender.sha256[:16] or sender.id}:{idempotency_key}"
