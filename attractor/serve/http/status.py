"""The routes that show how the server is: alive, ready, its figures, its description, its dashboard."""

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from starlette.responses import Response
from typing_extensions import TypedDict

from attractor.serve.http.auth import FIGURES, SCOPES, needs, open_to_all
from attractor.serve.http.schemas import ERRORS, Problem, Reply, without_paths
from attractor.serve.service import Service

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PLOTLY = "plotly.min.js"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The figures of one app, in a registry of their own, so that several apps fit into one process."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "attractor_requests",
            "Requests that were answered, by route, method and status.",
            ["route", "method", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "attractor_request_seconds",
            "Seconds from the head of a request to the end of its reply.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "attractor_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "attractor_requests_in_flight", "Requests that are being answered now.", registry=registry
        )
        self.prompt_tokens = Counter("attractor_prompt_tokens", "Tokens of all prompts.", registry=registry)
        self.written_tokens = Counter(
            "attractor_written_tokens", "Tokens that were generated.", registry=registry
        )
        self.finished = Counter(
            "attractor_generations",
            "Texts that were generated, by the reason of their end.",
            ["reason"],
            registry=registry,
        )
        self.lessons = Counter(
            "attractor_lessons", "Requests to learn, by their outcome.", ["outcome"], registry=registry
        )
        registry.register(ServiceFigures(service))

    def text(self) -> bytes:
        """All figures as text. This asks the service, and so does not belong on the event loop."""
        return generate_latest(self.registry)


class ServiceFigures:
    """The figures of the service, which is asked at every scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # otherwise registering would collect, before the service is ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (help_text, value) in gauges(self._service.monitor()).items():
            if value is not None:
                yield GaugeMetricFamily(f"attractor_{name}", help_text, value=value)


def gauges(now: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    queue, overlays = now["queue"], now["overlays"].values()
    last = now["progressive"][-1]["loss"] if now["progressive"] else None
    drift = [each["used"] / each["budget"] for each in now["drift"].values() if each["budget"] > 0]
    return {
        "version": ("The version of the weights.", now["version"]),
        "uptime_seconds": ("Seconds since the server started.", now["uptime"]),
        "learning": (
            "This is 1 where the server learns, and 0 where it does not.",
            float(now["learning"]),
        ),
        "generating": ("Texts that are being generated.", queue["generating"]),
        "waiting": ("Texts that wait to be generated.", queue["waiting"]),
        "lessons_waiting": ("Requests to learn that wait or are carried out.", queue["learning"]),
        "lessons_limit": ("The number of requests to learn that may wait.", queue["limit"]),
        "tokens_per_second": ("Tokens per second that were generated lately.", now["tokens_per_second"]),
        "journal_bytes": ("The size of the journal in bytes.", now["journal"]["bytes"]),
        "shared": (
            "This is 1 where servers share the store, and 0 elsewhere.",
            float(now["journal"]["shared"]),
        ),
        "behind": (
            "This is 1 where what servers that share the store have changed cannot be taken over.",
            float(now["journal"]["behind"] is not None),
        ),
        "overlays": ("The number of sources that taught something.", len(overlays)),
        "overlay_bytes": (
            "The size of what all sources taught, in bytes.",
            sum(each["bytes"] for each in overlays),
        ),
        "last_lesson_loss": ("The loss of the newest text before it was learned, in nats per token.", last),
        "drift_used": (
            "The largest share of its drift budget that any source has used.",
            max(drift, default=None),
        ),
    }


class LearnedText(TypedDict):
    """The loss of texts before they were learned, in nats per token."""

    version: int
    loss: float | None
    source: str


class Canary(TypedDict):
    version: int
    perplexity: float | None


class Usage(TypedDict):
    """How often each patch of a layer was chosen lately, and the entropy of that in nats."""

    entropy: float | None
    counts: list[float]


class OverlayFigures(TypedDict):
    """What is kept of one source."""

    version: int  # the newest that changed it
    tokens: int  # how many it saw
    bytes: int
    patches: dict[str, int]  # layer -> how many patches differ from the base


class Posterior(TypedDict):
    """How much each path counted at the end of a request."""

    at: float  # seconds since 1970
    version: int
    shares: dict[str, float]


class Queue(TypedDict):
    generating: int
    waiting: int  # to be generated
    learning: int  # requests to learn that wait or are carried out
    limit: int  # requests to learn that may wait


class JournalFigures(TypedDict):
    last: int  # number of the newest record
    bytes: int
    recovered: str | None  # what opening it had to cut off, without any path of the server
    shared: bool  # with other servers
    behind: str | None  # why what these have changed is not in use here


class Drift(TypedDict):
    used: float
    budget: float


class LessonCanary(TypedDict):
    """A text that lessons must leave alone."""

    rise: float  # of its perplexity, as a share
    windows: int
    windows_entered: int  # those that differ from the base's at all


class LessonFigures(TypedDict):
    """What there is to know of all lessons together, where lessons are taught."""

    count: int
    known: int  # so many of them
    sources: int
    patches: int
    bytes: int
    canaries: dict[str, LessonCanary]


class Monitor(TypedDict):
    version: int
    uptime: float  # seconds
    learning: bool
    progressive: list[LearnedText]
    canaries: dict[str, list[Canary]]
    usage: dict[str, Usage]  # layer ->
    overlays: dict[str, OverlayFigures]  # source ->
    posteriors: list[Posterior]
    queue: Queue
    tokens_per_second: float | None
    journal: JournalFigures
    drift: dict[str, Drift]  # source ->
    lessons: LessonFigures | None  # None where texts are learned


def add_status_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health")
    @open_to_all
    async def health() -> Reply:
        """Say that the process is alive, and nothing more."""
        return Reply({"status": "alive"})

    @app.get("/ready", responses=ERRORS)
    @needs(*FIGURES)
    async def ready() -> Reply:
        """Say whether generating works now: 503 and the reason where it does not."""
        is_ready, reason = await to_thread.run_sync(service.ready)
        return Reply({"ready": is_ready, "reason": without_paths(reason)}, 200 if is_ready else 503)

    @app.get("/v1/monitor", responses=ERRORS, response_model=Monitor)
    @needs(*FIGURES)
    async def monitor() -> Reply:
        """Return everything that the dashboard draws."""
        return Reply(await to_thread.run_sync(service.monitor))

    @app.get("/metrics", responses=ERRORS, response_class=Response)
    @needs(*FIGURES)
    async def prometheus() -> Response:
        return Response(await to_thread.run_sync(metrics.text), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/openapi.json", include_in_schema=False)
    @needs(*SCOPES)
    async def description() -> Reply:
        return Reply(app.openapi())


def add_dashboard(app: FastAPI) -> None:
    """Add the files of the dashboard. They hold no data: the page asks for a key first."""
    names = frozenset(each.name for each in files("attractor.serve").joinpath("dashboard").iterdir())

    @app.get("/", include_in_schema=False)
    @open_to_all
    async def index(request: Request) -> Response:
        return await _file(request, "index.html")

    @app.get("/dashboard/{name}", include_in_schema=False)
    @open_to_all
    async def asset(request: Request, name: str) -> Response:
        if name != PLOTLY and name not in names:  # a name, never a path
            raise Problem(404, "there is no such file")
        return await _file(request, name)


async def _file(request: Request, name: str) -> Response:
    content, packed, tag = await to_thread.run_sync(_read, name)
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
        "Content-Type": f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(content, headers=headers)


@cache
def _read(name: str) -> tuple[bytes, bytes, str]:
    """A file, its compressed copy, and a tag that changes with its content."""
    place: Traversable = (
        files("plotly").joinpath("package_data") if name == PLOTLY else files("attractor.serve")
    )
    content = (place if name == PLOTLY else place.joinpath("dashboard")).joinpath(name).read_bytes()
    return content, gzip.compress(content, 6, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:32]}"'
