"""From tokens to text as it is written: whole characters, stop strings, and prompts of chats.

writer = Writer(tokenizer, stops=["\\n\\n"])
for written in ticket: piece = writer.push(written); send(piece.text)
send(writer.finish().text)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attractor.serve.decode.sequences import Written
from attractor.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for a character that is cut
MOST_HELD = 16


class Detokenizer:
    """Text token by token, and how many tokens it is the text of; joined, it is the text of all together.

    A token may end within a character. Then the last tokens, three at most, are held until it is whole. What
    was told last stays as context: some tokenizers write the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._told: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> tuple[str, int]:
        self._held.append(token)
        text = self._decode(self._told + self._held)
        if not text.endswith(UNFINISHED) or len(self._held) > MOST_HELD:
            return self.finish()
        for count in range(min(3, len(self._held)), 0, -1):
            head, tail = self._held[:-count], self._held[-count:]
            if self._decode(self._told + head) + self._decode(tail) == text:
                return self._tell(len(head))
        return "", 0

    def finish(self) -> tuple[str, int]:
        return self._tell(len(self._held))

    def _tell(self, count: int) -> tuple[str, int]:
        now, self._held = self._held[:count], self._held[count:]
        text = self._decode(self._told + now)[len(self._decode(self._told)) :] if now else ""
        self._told = now if text else self._told
        return text, count


class StopStrings:
    """Lets text through up to the first stop string; holds back what may become one.

    The first is the one that is whole first, so that the pieces in which a text comes make no difference.
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
class Told:
    """A token with its text; where several make one character, the last has it."""

    text: str
    written: Written


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text to be sent now, and the tokens that end in it."""

    text: str
    tokens: list[Told]


class Writer:
    """What to send after each token. No token is told before all of its text is."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._unread: list[Written] = []  # tokens whose text is not known yet
        self._groups: list[tuple[str, list[Written]]] = []  # those whose text is not sent yet
        self._ahead = 0  # characters of the first group that were sent
        self.count = 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, written: Written) -> Piece:
        self.count += 1
        self._unread.append(written)
        return self._send(self._stops.push(self._read(*self._detokenizer.push(written.token))))

    def finish(self) -> Piece:
        """The rest, of which nothing may be a stop string any more unless it is whole."""
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
        tokens: list[Told] = []
        while self._groups and (len(self._groups[0][0]) <= self._ahead or self.stopped):
            whole, group = self._groups.pop(0)
            shown = whole[: self._ahead]
            self._ahead -= len(shown)
            if self.stopped and not shown:  # the stop string begins before this one
                break
            tokens += [Told("", written) for written in group[:-1]] + [Told(shown, group[-1])]
        return Piece(text, tokens)


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How messages become one text. `stops` end an answer; `marks` may not be in a message."""

    turns: Mapping[str, tuple[str, str]]  # role -> what stands before and after a message
    answer: str
    stops: tuple[str, ...]
    marks: tuple[str, ...] = ()

    def prompt(self, messages: Sequence[tuple[str, str]]) -> str:
        parts = []
        for role, content in messages:
            if found := [mark for mark in self.marks if mark in content]:
                raise ValueError(f"a message contains {found[0]!r}, which divides messages: leave it out")
            before, after = self.turns["system" if role == "developer" else role]
            parts.append(before + content + after)
        return "".join(parts) + self.answer


CHATS: Mapping[str, ChatFormat] = MappingProxyType(
    {
        "transcript": ChatFormat(
            {"system": ("", "\n\n"), "user": ("User: ", "\n"), "assistant": ("Assistant: ", "\n")},
            "Assistant:",
            ("\nUser:", "\nAssistant:"),
        ),
        "chatml": ChatFormat(
            {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")},
            "<|im_start|>assistant\n",
            ("<|im_end|>", "<|im_start|>"),
            ("<|im_end|>", "<|im_start|>"),
        ),
    }
)
