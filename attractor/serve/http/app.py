"""The HTTP side of a server.

app = create_app(service, ServeSettings(keys="keys.json"))
Server(uvicorn_config(app, settings), service).run()
"""

import asyncio
import logging
import math
from collections.abc import Callable
from socket import socket

import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute

from attractor.serve.config import ServeSettings
from attractor.serve.http.auth import KeyRing, declared
from attractor.serve.http.changes import Changes, add_change_routes, add_lesson_routes, add_text_routes
from attractor.serve.http.connections import limit_logs, limited
from attractor.serve.http.middleware import Middleware
from attractor.serve.http.openai import add_openai_routes
from attractor.serve.http.schemas import add_error_replies
from attractor.serve.http.status import Metrics, add_dashboard, add_status_routes
from attractor.serve.service import Service
from attractor.version import __version__

log = logging.getLogger("attractor")


def create_app(service: Service, settings: ServeSettings) -> FastAPI:
    """Make the app of a service. The caller keeps the service: it is not closed with the app."""
    keys = None if settings.keys is None else KeyRing.load(settings.keys)
    app = FastAPI(
        title="Attractor",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = Metrics(service)
    add_openai_routes(app, service, settings, metrics)
    changes = Changes(service, metrics)
    if service.teaches == "lessons":
        add_lesson_routes(app, service, settings, changes)
    else:
        add_text_routes(app, settings, changes)
    add_change_routes(app, service, changes)
    add_status_routes(app, service, metrics)
    add_dashboard(app)
    add_error_replies(app)
    if undeclared := [route for route in app.routes if declared(route) is None]:
        raise AssertionError(f"routes without a declared scope: {[_name(route) for route in undeclared]}")
    app.add_middleware(
        Middleware, router=app.router, service=service, settings=settings, keys=keys, metrics=metrics
    )
    return app


def _name(route: BaseRoute) -> str:
    return str(getattr(route, "path", route))


class Server(uvicorn.Server):
    """A server that ends with its service: texts under way get their time, and waiting requests a reply."""

    def __init__(
        self, config: uvicorn.Config, service: Service, ready: Callable[[int], object] = lambda port: None
    ) -> None:
        """`ready` is called with the port when the server listens, and never where the port is taken."""
        super().__init__(config)
        self.service, self.ready = service, ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            try:
                self.ready(self.servers[0].sockets[0].getsockname()[1])
            except Exception:  # the server serves, also if nothing could be printed
                log.exception("the server is ready, and announcing it failed")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        log.info("closing: what is being written and learned is finished")
        closing = asyncio.create_task(asyncio.to_thread(self.service.close))
        await super().shutdown(sockets)
        await closing


def uvicorn_config(app: FastAPI, settings: ServeSettings, patience: float = 60.0) -> uvicorn.Config:
    """Limit connections, headers and logs, trust no headers of a proxy, and do not log what was asked.

    Requests under way are cut off `patience` seconds after the server began to close.
    """
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=limited(settings),
        backlog=64,  # so many are accepted before they are counted
        h11_max_incomplete_event_size=32 << 10,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        ws="none",
        timeout_keep_alive=math.ceil(settings.idle_timeout),
        timeout_graceful_shutdown=math.ceil(patience),
    )
    limit_logs("attractor", "asyncio", "uvicorn.error")
    return config
