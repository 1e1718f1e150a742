"""The routes that show how the server is: alive, ready, its figures, its description, its dashboard."""

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from anyio import to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response

from attractor.serve.http.auth import FIGURES, SCOPES, needs, open_to_all
from attractor.serve.http.metrics import CONTENT_TYPE, Metrics
from attractor.serve.http.monitor import Monitor
from attractor.serve.http.openai import ERRORS
from attractor.serve.http.replies import Problem, Reply, without_paths
from attractor.serve.service import Service

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PLOTLY = "plotly.min.js"


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
        return Response(await to_thread.run_sync(metrics.text), headers={"Content-Type": CONTENT_TYPE})

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
