"""What is generated goes from the engine's thread to its readers through a stream."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from attractor.serve.decode.sequences import GeneratedToken
from attractor.serve.decode.touches import Touch

Finish = Literal["stop", "length", "cancelled", "error"]


class StreamBuffer:
    """The engine's side of a stream. It never waits: what is not read yet is at most a job's tokens."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.finish: Finish | None = None
        self.message: str | None = None
        self.touched: tuple[Touch, ...] = ()
        self.cancelled = False  # the engine looks here; setting it takes no lock, so any thread may do it
        self.changed = threading.Condition()
        self.tokens: deque[GeneratedToken] = deque()
        self.sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def put(self, token: GeneratedToken) -> None:
        with self.changed:
            self.tokens.append(token)
            self._wake()

    def end(self, finish: Finish, message: str | None, touched: tuple[Touch, ...] = ()) -> None:
        with self.changed:
            self.finish, self.message, self.touched = finish, message, touched
            self._wake()

    def _wake(self) -> None:
        self.changed.notify_all()
        for loop, event in self.sleepers:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed, and its reader will never read again
                self.cancelled = True
        self.sleepers = []

    def cancel(self) -> None:
        self.cancelled = True


class Stream:
    """The reader's side: `for token in stream`, `async for token in stream`, or `next`.

    The job is cancelled when the last reference to its stream is gone.
    """

    def __init__(self, buffer: StreamBuffer) -> None:
        self._buffer = buffer
        weakref.finalize(self, buffer.cancel).atexit = False

    @property
    def version(self) -> int | None:
        """The version of the weights; None as long as the job waits."""
        return self._buffer.version

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None as long as it goes on."""
        return self._buffer.finish

    @property
    def message(self) -> str | None:
        """What went wrong, where a text ended by an error."""
        return self._buffer.message

    @property
    def touched(self) -> tuple[Touch, ...]:
        """What a token that ended the text, and is not handed out, says of lessons that acted."""
        return self._buffer.touched

    def cancel(self) -> None:
        """The text ends soon; what was generated until then can still be read."""
        self._buffer.cancel()

    def next(self, timeout: float | None = None) -> GeneratedToken | None:
        """The next token, or None after the last; TimeoutError if none comes within so many seconds."""
        buffer = self._buffer
        with buffer.changed:
            if not buffer.changed.wait_for(lambda: buffer.tokens or buffer.finish, timeout):
                raise TimeoutError(f"no token came within {timeout} seconds")
            return buffer.tokens.popleft() if buffer.tokens else None

    def __iter__(self) -> Iterator[GeneratedToken]:
        while (token := self.next()) is not None:
            yield token

    async def anext(self) -> GeneratedToken | None:
        """`next` for a coroutine; `asyncio.timeout` limits it."""
        buffer = self._buffer
        while True:
            event = asyncio.Event()
            sleeper = (asyncio.get_running_loop(), event)
            with buffer.changed:
                if buffer.tokens:
                    return buffer.tokens.popleft()
                if buffer.finish is not None:
                    return None
                buffer.sleepers.append(sleeper)
            try:
                await event.wait()
            finally:
                with buffer.changed:
                    buffer.sleepers = [other for other in buffer.sleepers if other is not sleeper]

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        while (token := await self.anext()) is not None:
            yield token
