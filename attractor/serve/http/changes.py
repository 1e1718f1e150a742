"""What changes the model: texts that it learns, going back, forgetting, and the list of versions."""

import asyncio
from typing import Annotated, Any

from anyio import to_thread
from fastapi import FastAPI, Path, Query, Request

from attractor.serve.http.auth import FIGURES, Key, needs
from attractor.serve.http.generation import Disconnected, while_connected
from attractor.serve.http.metrics import Metrics
from attractor.serve.http.openai import ERRORS
from attractor.serve.http.replies import VERSION, Problem, Reply, problem_of
from attractor.serve.http.schemas import KEY, SOURCE, LearnForm, RollbackForm
from attractor.serve.http.settings import ServeSettings
from attractor.serve.service import TEACHING, Service, Verb

LEARN_ERRORS: dict[int | str, dict[str, Any]] = {**ERRORS, 409: ERRORS[400]}
NUMBER = Query(ge=1, lt=1 << 63)
IdempotencyQuery = Annotated[str | None, Query(pattern=KEY)]


class Changes:
    """Makes changes for requests, and counts what became of requests to learn."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service, self.metrics = service, metrics

    async def reply(
        self, request: Request, verb: Verb, *arguments: Any, source: str | None = None, **options: Any
    ) -> Reply:
        """Make a change, and reply when it is durable.

        What waits to be learned is dropped when its client disconnects. What has begun goes on, and so does
        all that takes something back.
        """
        request.state.audit["source"] = source
        if verb not in TEACHING:
            answer = await self.done(verb, *arguments, **options)
            return Reply(answer, headers={VERSION: str(answer["version"])})
        try:
            answer = await while_connected(request, self.done(verb, *arguments, **options))
        except Disconnected:
            self.metrics.lessons.labels("disconnected").inc()
            return Reply({}, 499)  # there is no client any more
        except Exception as error:
            self.failed(error)
            raise
        self.metrics.lessons.labels("learned").inc()
        return Reply(answer, headers={VERSION: str(answer["version"])})

    async def done(self, verb: Verb, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The answer of the service; its errors as replies."""
        if verb in TEACHING and not self.service.learning:
            raise Problem(409, "this server does not learn: start it with --learn", code="not_learning")
        try:
            return await asyncio.wrap_future(self.service.begin(verb, *arguments, **options))
        except LookupError as error:
            if isinstance(error, KeyError | IndexError) or not error.args:
                raise
            code = "unknown_source" if verb == "forget" else "unknown_lesson"
            raise Problem(404, str(error.args[0]), code=code) from error
        except ValueError as error:
            raise problem_of(error, wrong=422) from error

    def failed(self, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, Problem) and error.__cause__ else error
        self.metrics.lessons.labels(type(cause).__name__.lower()).inc()


def add_change_routes(app: FastAPI, service: Service, changes: Changes) -> None:
    @app.post("/v1/rollback", responses=LEARN_ERRORS)
    @needs("admin")
    async def rollback(form: RollbackForm, request: Request) -> Reply:
        """Make a new version in which everything is as it was at an earlier one."""
        request.state.audit["to"] = form.version
        return await changes.reply(
            request, "rollback", form.version, *who_asked(request, form.idempotency_key)
        )

    @app.delete("/v1/sources/{source}", responses=LEARN_ERRORS)
    @needs("admin")
    async def forget(
        source: Annotated[str, Path(pattern=SOURCE)],
        request: Request,
        idempotency_key: IdempotencyQuery = None,
        erase: bool = False,
    ) -> Reply:
        """Forget everything that a source taught; with `erase` no rollback can bring it back."""
        request.state.audit["erase"] = erase
        asked = who_asked(request, idempotency_key)
        return await changes.reply(request, "forget", source, *asked, erase, source=source)

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


def add_text_routes(app: FastAPI, settings: ServeSettings, changes: Changes) -> None:
    @app.post("/v1/learn", responses=LEARN_ERRORS)
    @needs("learn")
    async def learn(form: LearnForm, request: Request) -> Reply:
        """Learn a text, or several in order. The reply comes when the change is durable and in use."""
        texts = [form.text] if form.text is not None else form.texts or []
        if len(texts) > settings.max_texts:
            raise Problem(422, f"{len(texts)} texts; at most {settings.max_texts}", param="texts")
        asked = who_asked(request, form.idempotency_key)
        return await changes.reply(request, "learn", texts, form.source, *asked, source=form.source)


def who_asked(request: Request, idempotency_key: str | None) -> tuple[str | None, str]:
    """An idempotency key as the service gets it, and who sent it.

    The same key of another sender is another key.
    """
    sender: Key = request.state.key
    key = None if idempotency_key is None else f"{sender.sha256[:16] or sender.id}:{idempotency_key}"
    return key, sender.id
