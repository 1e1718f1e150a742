"""Every option of the HTTP side of a server."""

import dataclasses
import ipaddress
from pathlib import Path
from typing import Literal, get_args

from attractor.config import check_choice, check_number, check_size

ChatName = Literal["transcript", "chatml"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    keys: str | Path | None = None
    """A file of keys (`attractor.serve.http.auth.add_key`). Without it only this machine may ask."""
    chat: ChatName = "transcript"
    """How messages become a prompt: a plain transcript, or the marks that instruction-tuned models know."""

    max_body: int = 4 << 20
    """Bytes of a request."""
    body_timeout: float = 30.0
    """Seconds until a request must be here whole."""
    max_depth: int = 16
    """Lists and objects within each other."""
    max_prompt_tokens: int = 65536
    """Of all prompts of a request together, before any is shortened to the model's context."""
    max_tokens: int = 4096
    """That a request may ask for, each time."""
    default_max_tokens: int = 256
    """Of a chat that does not say; a completion that does not say gets 16, as that interface has it."""
    max_choices: int = 16
    """Prompts of a request times its n."""
    max_texts: int = 256
    """Of a lesson."""
    max_lessons: int = 64
    """That may wait for their answers at once."""

    def __post_init__(self) -> None:
        check_choice("chat", self.chat, get_args(ChatName))
        for name in (
            "max_body", "max_depth", "max_prompt_tokens", "max_tokens", "default_max_tokens", "max_choices",
            "max_texts", "max_lessons",
        ):  # fmt: skip
            check_size(name, getattr(self, name))
        if type(self.port) is not int or not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port!r} must be an integer, 0 to 65535")
        check_number("body_timeout", self.body_timeout, "a number above 0", lambda seconds: seconds > 0)
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
