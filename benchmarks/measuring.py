"""What benchmarks of a server share: a served port, the time that methods take, and times in milliseconds."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the worst of some times."""
    shares = {"p50_ms": 50, "p99_ms": 99, "worst_ms": 100}
    return {name: float(1e3 * np.percentile(seconds, share)) for name, share in shares.items()}


@contextlib.contextmanager
def spent_in(*methods: tuple[Any, str]) -> Iterator[list[float]]:
    """Count the seconds that these methods, each an object and a name, take: a list with one number."""
    spent = [0.0]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - started

        return call

    for owner, name in methods:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name in methods:
            delattr(owner, name)


@contextlib.contextmanager
def listening(service: Any, **settings: Any) -> Iterator[int]:
    """Serve on a free port of this machine; `settings` are those of `ServeSettings`."""
    import uvicorn

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app, uvicorn_config

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ServeSettings(port=port, **settings)
    server = uvicorn.Server(uvicorn_config(create_app(service, given), given))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()
