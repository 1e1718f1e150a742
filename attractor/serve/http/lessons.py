"""The routes of a server that is taught lessons: teach, list, look at one, revise, forget, export, import."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from anyio import to_thread
from fastapi import FastAPI, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from attractor.serve.http.auth import needs
from attractor.serve.http.changes import LEARN_ERRORS, Changes, IdempotencyQuery, who_asked
from attractor.serve.http.middleware import takes_bytes
from attractor.serve.http.openai import ERRORS, event
from attractor.serve.http.replies import Problem, Reply, problem_of
from attractor.serve.http.schemas import SOURCE, LessonForm, LessonsForm
from attractor.serve.http.settings import ServeSettings
from attractor.serve.learning.asked import Asked
from attractor.serve.service import Service

EVENTS = "text/event-stream"
FILE = "application/octet-stream"
SourceQuery = Annotated[str | None, Query(pattern=SOURCE)]
Number = Annotated[int, Path(ge=0, lt=1 << 62)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Below = Annotated[int | None, Query(ge=0, lt=1 << 62, description="For paging: lessons with smaller numbers")]
Search = Annotated[str | None, Query(max_length=256, description="A text in what a lesson says")]


def add_lesson_routes(app: FastAPI, service: Service, settings: ServeSettings, changes: Changes) -> None:
    @app.post("/v1/learn", responses=LEARN_ERRORS, include_in_schema=False)
    @app.post("/v1/lessons", responses=LEARN_ERRORS)
    @needs("learn")
    async def teach(form: LessonsForm, request: Request) -> Response:
        """Teach lessons. The reply comes when they are tested, durable and in use.

        With `Accept: text/event-stream` it is a stream of events that tell what is being done, and of which
        the last one is the reply or an error.
        """
        forms: Sequence[LessonForm] = [form] if form.lessons is None else form.lessons
        what = await run_in_threadpool(read_lessons, forms, settings)
        asked = who_asked(request, form.idempotency_key)
        given: dict[str, Any] = {"require_known": form.require_known}
        if EVENTS not in request.headers.get("accept", ""):
            return await changes.reply(
                request, "learn", what, form.source, *asked, source=form.source, **given
            )
        request.state.audit["source"] = form.source
        return await with_progress(changes, what, form.source, *asked, **given)

    @app.get("/v1/lessons", responses=ERRORS)
    @needs("learn", "admin")
    async def lessons(
        search: Search = None,
        source: SourceQuery = None,
        after: datetime | None = None,
        before: datetime | None = None,
        below: Below = None,
        limit: Limit = 50,
    ) -> Reply:
        """List lessons, the newest first, without their words."""
        version = service.version
        found = await to_thread.run_sync(
            lambda: service.lessons(search=search, source=source, after=in_utc(after), before=in_utc(before))
        )
        page = [entry for entry in found if below is None or entry["lesson"] < below][:limit]
        data = [without_words(entry) for entry in page]
        return Reply({"object": "list", "version": version, "total": len(found), "data": data})

    @app.delete("/v1/lessons", responses=LEARN_ERRORS)
    @needs("admin")
    async def forget_some(
        request: Request,
        source: SourceQuery = None,
        after: datetime | None = None,
        before: datetime | None = None,
        idempotency_key: IdempotencyQuery = None,
        erase: bool = False,
    ) -> Reply:
        """Forget the lessons of a source, of a time, or both: as of now, all that `GET` lists."""
        if source is None and after is None and before is None:
            raise Problem(422, "say which lessons: give 'source', 'after' or 'before'", param="source")
        which = {"source": source, "after": in_utc(after), "before": in_utc(before)}
        request.state.audit["erase"] = erase
        asked = who_asked(request, idempotency_key)
        return await changes.reply(request, "forget_where", which, *asked, erase, source=source)

    @app.get("/v1/lessons/export", responses=ERRORS)
    @needs("admin")
    async def export(lesson: Annotated[list[int] | None, Query(max_length=1000)] = None) -> Response:
        """Lessons as a file, for a server with the same base: all of them, or those that are named."""
        try:
            data = await to_thread.run_sync(service.export_lessons, lesson)
        except LookupError as error:
            raise Problem(404, str(error.args[0]), code="unknown_lesson") from error
        name = f"{service.name}-v{service.version}.lessons"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type=FILE, headers=headers)

    @app.post("/v1/lessons/import", responses=LEARN_ERRORS)
    @needs("admin")
    @takes_bytes
    async def take_over(
        request: Request,
        source: Annotated[str, Query(pattern=SOURCE)] = "imported",
        idempotency_key: IdempotencyQuery = None,
    ) -> Response:
        """Take over the lessons of a file. The body is what `export` gave."""
        asked = who_asked(request, idempotency_key)
        data = await request.body()
        return await changes.reply(request, "import_lessons", data, source, *asked, source=source)

    @app.get("/v1/lessons/{number}", responses=ERRORS)
    @needs("learn", "admin")
    async def lesson(number: Number) -> Reply:
        """All that is known of a lesson, with its words."""
        entry = service.lesson(number)
        if entry is None:
            raise Problem(404, f"there is no lesson {number}", code="unknown_lesson")
        return Reply(entry)

    @app.put("/v1/lessons/{number}", responses=LEARN_ERRORS)
    @needs("learn")
    async def revise(form: LessonForm, number: Number, request: Request) -> Reply:
        """Teach another lesson about the same subject in the place of this one."""
        check_count("forms", len(form.forms or ()), settings)
        request.state.audit["lesson"] = number
        asked = who_asked(request, form.idempotency_key)
        return await changes.reply(request, "revise", number, form.said, *asked)

    @app.delete("/v1/lessons/{number}", responses=LEARN_ERRORS)
    @needs("admin")
    async def forget(
        number: Number, request: Request, idempotency_key: IdempotencyQuery = None, erase: bool = False
    ) -> Reply:
        """Forget a lesson; with `erase` no rollback can bring it back, and its words are gone."""
        request.state.audit |= {"lesson": number, "erase": erase}
        asked = who_asked(request, idempotency_key)
        return await changes.reply(request, "forget_lessons", [number], *asked, erase)


def without_words(entry: dict[str, Any]) -> dict[str, Any]:
    """With the number of forms in their place."""
    return {**entry, "forms": len(entry["forms"]), "taken_in": len(entry["taken_in"])}


def in_utc(time: datetime | None) -> str | None:
    """As lessons are dated; a time without a zone is in UTC."""
    if time is None:
        return None
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="milliseconds")


def read_lessons(forms: Sequence[LessonForm], settings: ServeSettings) -> list[Asked]:
    """What is asked for, or the reason why it makes no sense."""
    check_count("forms", max(len(forms), sum(len(form.forms or ()) for form in forms)), settings)
    try:
        what = [form.said.asked() for form in forms]
    except ValueError as error:
        raise Problem(422, str(error), param="forms") from error
    check_count("text", sum(len(each.forms) for each in what), settings)
    return what


def check_count(param: str, count: int, settings: ServeSettings) -> None:
    if count > settings.max_texts:
        message = f"{count} lessons or sentences; at most {settings.max_texts}: teach it in pieces"
        raise Problem(422, message, param=param)


async def with_progress(changes: Changes, *given: Any, **options: Any) -> Response:
    """A reply that begins at once and tells what is being done; what is refused at once is a plain reply."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()

    def report(about: dict[str, Any]) -> None:
        if not loop.is_closed():  # the writer's thread may outlive a client
            loop.call_soon_threadsafe(events.put_nowait, about)

    learning = asyncio.ensure_future(changes.done("learn", *given, **options, report=report))
    learning.add_done_callback(lambda _: events.put_nowait(None))
    await asyncio.sleep(0)  # until it waits for the writer
    if learning.done():
        learning.result()
    return StreamingResponse(progress(changes, learning, events), media_type=EVENTS)


async def progress(
    changes: Changes, learning: asyncio.Future[dict[str, Any]], events: asyncio.Queue[dict[str, Any] | None]
) -> AsyncGenerator[str, None]:
    """Events while lessons are learned; the last one is the answer or an error."""
    try:
        yield event({"state": "waiting"})
        while (about := await events.get()) is not None:
            yield event(about)
        answer = learning.result()
        changes.metrics.lessons.labels("learned").inc()
        yield event({"state": "learned", **answer})
    except Exception as error:
        changes.failed(error)
        yield event({"state": "failed", **problem_of(error).content})
    finally:
        learning.cancel()  # one that waits is dropped where its client has left
    yield "data: [DONE]\n\n"
