"""An app on a port of this machine, for tests."""

import socket
import threading
import time

import uvicorn

from attractor.serve.http.app import uvicorn_config


class Running:
    """An app on a port of this machine."""

    def __init__(self, app, settings):
        self.server = uvicorn.Server(uvicorn_config(app, settings))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


def until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()
