"""The routes that teach, list versions, and take lessons back."""

from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Path, Query, Request

from attractor.serve.errors import Busy
from attractor.serve.http.auth import FIGURES, needs
from attractor.serve.http.metrics import Metrics
from attractor.serve.http.openai import ERRORS
from attractor.serve.http.replies import VERSION, Problem, Reply, problem_of
from attractor.serve.http.schemas import SOURCE, LearnForm, RollbackForm
from attractor.serve.http.settings import ServeSettings
from attractor.serve.service import Service

LEARN_ERRORS: dict[int | str, dict[str, Any]] = {**ERRORS, 409: ERRORS[400]}
NUMBER = Query(ge=1, lt=1 << 63)


def add_lesson_routes(app: FastAPI, service: Service, settings: ServeSettings, metrics: Metrics) -> None:
    # These have threads of their own, so that lessons that wait do not hold up other requests.
    threads = CapacityLimiter(settings.max_lessons)

    async def change(request: Request, work: Any, *arguments: Any, source: str | None = None) -> Reply:
        """Make a change and wait until it is durable. It goes on when the client disconnects."""
        request.state.audit["source"] = source
        try:
            if not threads.available_tokens:
                raise Busy(f"{settings.max_lessons} changes wait already", 1.0)
            answer = await to_thread.run_sync(work, *arguments, limiter=threads)
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
            reply = await change(
                request, service.learn, texts, form.source, form.idempotency_key, source=form.source
            )
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
        return await change(request, service.rollback, form.version, form.idempotency_key)

    @app.delete("/v1/sources/{source}", responses=LEARN_ERRORS)
    @needs("admin")
    async def forget(
        source: Annotated[str, Path(pattern=SOURCE)],
        request: Request,
        idempotency_key: Annotated[str | None, Query(pattern=r"^[!-~]{1,128}$")] = None,
    ) -> Reply:
        """Forget everything that a source taught."""
        return await change(request, service.forget, source, idempotency_key, source=source)

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
