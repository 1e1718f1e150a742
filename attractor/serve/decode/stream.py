"""From the engine to a reader: a stream of tokens, and their text: whole characters, up to stop strings.

decoder = TextDecoder(tokenizer, stops=["\\n\\n"])
for token in stream: piece = decoder.push(token); send(piece.text)
send(decoder.finish().text)
"""

import asyncio
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal

from attractor.serve.decode.sequences import GeneratedToken, Touch
from attractor.tokenizer import Detokenizer, Tokenizer

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


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    The first stop string is the one that is complete first, so that it makes no difference in which pieces
    the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            free, self._held = self._held[: min(found)[1]], ""
            return free
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        free, self._held = self._held[:cut], self._held[cut:]
        return free

    def finish(self) -> str:
        free, self._held = self._held, ""
        return free


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token with its text; where several tokens make one character, the last of them has it."""

    text: str
    generated: GeneratedToken


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text to be sent now, and the tokens that end in it."""

    text: str
    tokens: list[TokenText]


class TextDecoder:
    """Says what to send after each token. No token is sent before all of its text is."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._unread: list[GeneratedToken] = []  # tokens whose text is not known yet
        self._groups: list[tuple[str, list[GeneratedToken]]] = []  # those whose text is not sent yet
        self._ahead = 0  # characters of the first group that were sent
        self.count = 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, generated: GeneratedToken) -> Piece:
        self.count += 1
        self._unread.append(generated)
        return self._send(self._stops.push(self._read(*self._detokenizer.push(generated.token))))

    def finish(self) -> Piece:
        """The rest of the text, up to a stop string that is complete in it."""
        if self.stopped:
            return Piece("", [])
        text = self._stops.push(self._read(*self._detokenizer.finish()))
        return self._send(text + self._stops.finish())

    def _read(self, text: str, count: int) -> str:
        if count:
            self._groups.append((text, self._unread[:count]))
            del self._unread[:count]
        return text

    def _send(self, text: str) -> Piece:
        self._ahead += len(text)
        tokens: list[TokenText] = []
        while self._groups and (len(self._groups[0][0]) <= self._ahead or self.stopped):
            whole, group = self._groups.pop(0)
            shown = whole[: self._ahead]
            self._ahead -= len(shown)
            if self.stopped and not shown:  # the stop string begins before this one
                break
            tokens += [TokenText("", one) for one in group[:-1]] + [TokenText(shown, group[-1])]
        return Piece(text, tokens)
