"""The options of the HTTP side of a server."""

import dataclasses
import ipaddress
from pathlib import Path
from typing import Literal, get_args

from attractor.config import check_choice, check_number, check_size

ChatName = Literal["model", "transcript", "chatml"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server is reached, and how much a request may take."""

    host: str = "127.0.0.1"
    """The address that the server listens on; other than this machine needs `keys`."""
    port: int = 8000
    """The port that it listens on; 0 takes a free one."""
    keys: str | Path | None = None
    """A file of keys (`attractor.serve.http.auth.add_key`). Without it only this machine is answered."""
    chat: ChatName | None = None
    """How messages become a prompt: as the model was trained to chat, as a transcript, or with the marks of
    many instruction-tuned models. By default as the model was trained, or else as a transcript."""

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
    max_texts: int = 256
    """The most texts that are learned at once."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            check_choice("chat", self.chat, get_args(ChatName))
        for name in (
            "max_body",
            "max_file",
            "max_depth",
            "max_prompt_characters",
            "max_prompt_tokens",
            "max_tokens",
            "default_max_tokens",
            "max_choices",
            "max_texts",
            "max_connections",
            "max_values",
        ):
            check_size(name, getattr(self, name))
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
