"""What changes the model: lessons or texts that it learns, going back, and forgetting; and the versions."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from anyio import to_thread
from fastapi import FastAPI, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from attractor.continual.forms import sentences_of
from attractor.serve.config import ServeSettings
from attractor.serve.http.auth import FIGURES, Key, needs
from attractor.serve.http.generation import Disconnected, while_connected
from attractor.serve.http.middleware import takes_bytes
from attractor.serve.http.openai import event
from attractor.serve.http.schemas import (
    ERRORS,
    KEY,
    SOURCE,
    VERSION,
    LearnForm,
    LessonForm,
    LessonsForm,
    Problem,
    Reply,
    RevisionForm,
    RollbackForm,
    problem_of,
)
from attractor.serve.http.status import Metrics
from attractor.serve.learning.catalogue import Asked
from attractor.serve.service import TEACHING, Service, Verb

LEARN_ERRORS: dict[int | str, dict[str, Any]] = {**ERRORS, 409: ERRORS[400]}
NUMBER = Query(ge=1, lt=1 << 63)
IdempotencyQuery = Annotated[str | None, Query(pattern=KEY)]
EVENTS = "text/event-stream"
FILE = "application/octet-stream"
MOST_SENTENCES = 16
"""A text may have so many times more sentences than are taught of it."""
SourceQuery = Annotated[str | None, Query(pattern=SOURCE)]
Number = Annotated[int, Path(ge=0, lt=1 << 62)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Below = Annotated[int | None, Query(ge=0, lt=1 << 62, description="For paging: lessons with smaller numbers")]
Search = Annotated[str | None, Query(max_length=256, description="A text in what a lesson says")]


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
        self.learned(answer)
        return Reply(answer, headers={VERSION: str(answer["version"])})

    async def done(self, verb: Verb, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The answer of the service; its errors as replies."""
        if not self.service.learning:
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

    def learned(self, answer: dict[str, Any]) -> None:
        self.metrics.lessons.labels("learned" if answer.get("kept", True) else "not kept").inc()

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


def add_lesson_routes(app: FastAPI, service: Service, settings: ServeSettings, changes: Changes) -> None:
    @app.post("/v1/learn", responses=LEARN_ERRORS, include_in_schema=False)
    @app.post("/v1/lessons", responses=LEARN_ERRORS)
    @needs("learn")
    async def teach(form: LessonsForm, request: Request) -> Response:
        """Teach lessons. The reply comes when they are tested, and durable and in use if they are known.

        With an idempotency key that was answered before it is that answer again (`repeated`), with the newest
        version (`now`); `stands` of each lesson says whether it is there now, `kept` whether it was at first.

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
        require_known: bool = True,
    ) -> Response:
        """Take over the lessons of a file. The body is what `export` gave."""
        asked, data = who_asked(request, idempotency_key), await request.body()
        given: dict[str, Any] = {"source": source, "require_known": require_known}
        return await changes.reply(request, "import_lessons", data, source, *asked, **given)

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
    async def revise(form: RevisionForm, number: Number, request: Request) -> Reply:
        """Teach another lesson about the same subject in the place of this one, if it is known then."""
        await run_in_threadpool(check_sizes, [form], settings)
        request.state.audit["lesson"] = number
        asked = who_asked(request, form.idempotency_key)
        known = form.require_known
        return await changes.reply(request, "revise", number, form.said, *asked, require_known=known)

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
    """An entry of the catalogue that has the numbers of its forms in place of their words."""
    return {**entry, "forms": len(entry["forms"]), "taken_in": len(entry["taken_in"])}


def in_utc(time: datetime | None) -> str | None:
    """A time as lessons are dated; one without a zone is in UTC."""
    if time is None:
        return None
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    try:
        return aware.astimezone(UTC).isoformat(timespec="milliseconds")
    except OverflowError as error:
        raise Problem(422, f"{time.isoformat()} lies outside the years 1 to 9999 of UTC") from error


def read_lessons(forms: Sequence[LessonForm], settings: ServeSettings) -> list[Asked]:
    """What is asked for, or the reason why it makes no sense."""
    check_sizes(forms, settings)
    sentences = sum(len(sentences_of(form.text)) for form in forms if form.text is not None)
    if sentences > MOST_SENTENCES * settings.max_texts:
        most = MOST_SENTENCES * settings.max_texts
        raise Problem(422, f"{sentences} sentences; at most {most}: teach it in pieces", param="text")
    what: list[Asked] = []
    for form in forms:
        try:
            what += form.said.asked()
        except ValueError as error:
            raise Problem(422, str(error), param="text" if form.forms is None else "forms") from error
    check_count("text", sum(len(each.forms) for each in what), settings)
    return what


def check_sizes(forms: Sequence[LessonForm], settings: ServeSettings) -> None:
    """What is too much is not even taken apart into words."""
    check_count("forms", max(len(forms), sum(len(form.forms or ()) for form in forms)), settings)
    texts = (text for form in forms for said in (form.text, *(form.said.forms or ())) for text in parts(said))
    characters = sum(map(len, texts))
    if characters > settings.max_lesson_characters:
        most = settings.max_lesson_characters
        raise Problem(422, f"{characters:,} characters; at most {most:,}: teach it in pieces", param="text")


def parts(said: str | tuple[str, str] | None) -> tuple[str, ...]:
    return said if isinstance(said, tuple) else (said or "",)


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
        changes.learned(answer)
        yield event({"state": "learned", **answer})
    except Exception as error:
        changes.failed(error)
        yield event({"state": "failed", **problem_of(error).content})
    finally:
        learning.cancel()  # one that waits is dropped where its client has left
    yield "data: [DONE]\n\n"
