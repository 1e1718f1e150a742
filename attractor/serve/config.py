"""Every option of a server. These options import no torch: `--help` shows them."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attractor.config import JSONConfig, check_choice, check_number, check_size

SyncName = Literal["always", "off"]
ChatName = Literal["model", "questions", "transcript", "chatml"]


@dataclass(frozen=True, kw_only=True)
class Rules(JSONConfig):
    """Which changes are kept: how much canaries may suffer, and how much a source may teach."""

    canary_rise: float = 0.01
    """The share by which a canary's perplexity may rise for readers, beyond the bound of the guard."""
    drift: float | None = 2.0
    """Nats per token that a path alone may lose on a canary, over all that it learned."""
    canary_tokens: int = 512
    """The tokens of each canary by which a change is judged; for lessons, of the one that the base writes."""
    audit_every: int = 64
    """Texts from one audit on whole canaries to the next; where one suffers, all since is taken back."""
    text_tokens: int = 65_536
    """The most tokens of a lesson, or of the texts of one request."""
    source_tokens: int | None = None
    """The most tokens that one source may teach, in all."""

    def __post_init__(self) -> None:
        check_number("canary_rise", self.canary_rise, "a share, 0 or more", lambda share: share >= 0)
        if self.drift is not None:
            check_number("drift", self.drift, "a number of nats, 0 or more", lambda nats: nats >= 0)
        for name in ("canary_tokens", "audit_every", "text_tokens"):
            check_size(name, getattr(self, name))
        if self.source_tokens is not None:
            check_size("source_tokens", self.source_tokens)


@dataclass(frozen=True, kw_only=True)
class Limits(JSONConfig):
    """How much a server takes on at a time."""

    rows: int = 64
    """Texts that are written at the same time, as one batch."""
    waiting: int = 256
    """Texts that wait for a place."""
    learning: int = 64
    """Requests to learn that wait for the writer."""
    administration: int = 8
    """Rollbacks and deletions that wait for the writer: they have places of their own, and go first."""
    snapshot_every: int = 256
    """Changes from one snapshot to the next: what a start has to read again, at most."""
    keep_snapshots: int = 8
    """Snapshots that are kept: how far back a rollback can go."""
    learning_share: float | None = None
    """The share of the time that learning may take while texts are being written (default: 0.15 on a GPU, and
    0.4 on a CPU, where each has cores of its own)."""
    drain: float = 10.0
    """Seconds that texts under way have to end when the server does."""
    turn: float = 60.0
    """Seconds that a change waits, at most, for those of other servers that share the store."""
    follow: float = 0.2
    """Seconds from one look at what other servers that share the store have changed to the next."""

    def __post_init__(self) -> None:
        for name in ("rows", "waiting", "learning", "administration", "snapshot_every", "keep_snapshots"):
            check_size(name, getattr(self, name))
        if self.learning_share is not None:
            check_number("learning_share", self.learning_share, "0 < share <= 1", lambda s: 0 < s <= 1)
        for name in ("drain", "turn"):
            check_number(name, getattr(self, name), "a number of seconds, 0 or more", lambda s: s >= 0)
        check_number("follow", self.follow, "a number of seconds above 0", lambda s: s > 0)

    def share_on(self, device: str) -> float:
        """The share of the time that learning may take on this kind of device."""
        usual = 0.15 if device == "cuda" else 0.4
        return usual if self.learning_share is None else self.learning_share


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server is reached, and how much a request may take."""

    host: str = "127.0.0.1"
    """The address that the server listens on; other than this machine needs `keys`."""
    port: int = 8000
    """The port that it listens on; 0 takes a free one."""
    keys: str | Path | None = None
    """A file of keys (`attractor.serve.http.auth.add_key`). Without it only this machine is answered."""
    chat: ChatName | None = None
    """How messages become a prompt: as the model was trained to chat, as questions and answers, as a
    transcript, or with the marks of many instruction-tuned models. By default as it was trained, or else as
    questions where lessons are taught, and as a transcript where texts are."""

    max_body: int = 4 << 20
    """The largest body of a request, in bytes."""
    max_file: int = 256 << 20
    """The largest file of lessons that is taken over, in bytes."""
    body_timeout: float = 30.0
    """The seconds within which the whole body of a request must arrive."""
    idle_timeout: float = 30.0
    """The seconds within which a connection must send the head of its next request, or read its reply."""
    max_connections: int = 512
    """The most connections at once; fewer where the process may open few files."""
    max_values: int = 1 << 17
    """The most numbers, texts, lists and objects in a body."""
    max_depth: int = 16
    """How deep lists and objects may be nested in a body."""
    max_prompt_characters: int = 1 << 18
    """The most characters of all prompts of a request together: longer ones are not even tokenized."""
    max_prompt_tokens: int = 65536
    """The most tokens of all prompts of a request together, before any is cut to the context."""
    max_tokens: int = 4096
    """The most tokens that a request may ask for, for each of its texts."""
    default_max_tokens: int = 256
    """The tokens of a chat that does not ask for a number. A completion gets 16, as with OpenAI."""
    max_choices: int = 16
    """The most texts of a request: the number of its prompts times its n."""
    max_lesson_characters: int = 1 << 20
    """The most characters of all lessons of a request together."""
    max_texts: int = 256
    """The most texts that are learned at once."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            check_choice("chat", self.chat, get_args(ChatName))
        for name, value in vars(self).items():
            if name.startswith(("max_", "default_max_")):
                check_size(name, value)
        if type(self.port) is not int or not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port!r} must be an integer, 0 to 65535")
        for name in ("body_timeout", "idle_timeout"):
            check_number(name, getattr(self, name), "a number above 0", lambda seconds: seconds > 0)
        if self.keys is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and there are no keys: give keys=, "
                "or use 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether this name or address is the machine itself, whatever a name server says."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
