"""What a server answers when it cannot do what it was asked, apart from wrong questions (ValueError)."""

from collections.abc import Mapping
from typing import Any


class Busy(Exception):
    """There is no room now; `retry_after` seconds later there may be."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """A lesson that may not be published; `figures` say why. Nothing was changed."""

    def __init__(self, message: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.figures = dict(figures or {})


class Unavailable(Exception):
    """Learning is not possible now, say because the disk is full; generating is."""


class KeyReused(ValueError):
    """An idempotency key that came with something else before. Nothing was changed."""
