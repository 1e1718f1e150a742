"""Between the thread that writes and whoever reads what it wrote."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from attractor.serve.decode.sequences import Written

Finish = Literal["stop", "length", "cancelled", "error"]


class Outlet:
    """The writer's side. It never waits: what nobody has taken yet is at most a job's tokens."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.finish: Finish | None = None
        self.message: str | None = None
        self.cancelled = False  # the writer looks here; setting it takes no lock, so anybody may at any time
        self.changed = threading.Condition()
        self.written: deque[Written] = deque()
        self.sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def put(self, written: Written) -> None:
        with self.changed:
            self.written.append(written)
            self._wake()

    def end(self, finish: Finish, message: str | None) -> None:
        with self.changed:
            self.finish, self.message = finish, message
            self._wake()

    def _wake(self) -> None:
        self.changed.notify_all()
        for loop, event in self.sleepers:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed: nobody is left who could read
                self.cancelled = True
        self.sleepers = []

    def cancel(self) -> None:
        self.cancelled = True


class Ticket:
    """The reader's side: `for written in ticket`, `async for written in ticket`, or `next`.

    When nobody holds the ticket any more, its job is cancelled.
    """

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        weakref.finalize(self, outlet.cancel).atexit = False

    @property
    def version(self) -> int | None:
        """Of the weights; None as long as the job waits."""
        return self._outlet.version

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None as long as it goes on."""
        return self._outlet.finish

    @property
    def message(self) -> str | None:
        """What there is to say about an end by error."""
        return self._outlet.message

    def cancel(self) -> None:
        """The text ends soon; what was written can still be read."""
        self._outlet.cancel()

    def next(self, timeout: float | None = None) -> Written | None:
        """The next token, or None after the last; TimeoutError if none comes within so many seconds."""
        outlet = self._outlet
        with outlet.changed:
            if not outlet.changed.wait_for(lambda: outlet.written or outlet.finish, timeout):
                raise TimeoutError(f"no token came within {timeout} seconds")
            return outlet.written.popleft() if outlet.written else None

    def __iter__(self) -> Iterator[Written]:
        while (written := self.next()) is not None:
            yield written

    async def anext(self) -> Written | None:
        """`next` for a coroutine; `asyncio.timeout` limits it."""
        outlet = self._outlet
        while True:
            event = asyncio.Event()
            sleeper = (asyncio.get_running_loop(), event)
            with outlet.changed:
                if outlet.written:
                    return outlet.written.popleft()
                if outlet.finish is not None:
                    return None
                outlet.sleepers.append(sleeper)
            try:
                await event.wait()
            finally:
                with outlet.changed:
                    outlet.sleepers = [other for other in outlet.sleepers if other is not sleeper]

    async def __aiter__(self) -> AsyncIterator[Written]:
        while (written := await self.anext()) is not None:
            yield written
