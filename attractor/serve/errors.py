"""What a server answers when it cannot do what it was asked, apart from wrong questions (ValueError)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Busy(Exception):
    """There is no room now; `retry_after` seconds later there may be."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """A change may not be published; `figures` say why. Nothing was changed.

    Of several lessons, `at_fault` are the places (from 0) of those without which the others might be.
    """

    def __init__(
        self, message: str, figures: Mapping[str, Any] | None = None, at_fault: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.figures, self.at_fault = dict(figures or {}), list(at_fault)


class Unavailable(Exception):
    """Learning is not possible now, say because the disk is full; generating is."""


class KeyReused(ValueError):
    """An idempotency key was given before with another content, or by another sender. Nothing was changed."""


class StoreDamaged(ValueError):
    """Bytes of a store are not what was written; `path` says in which file, and `record` in which record."""

    def __init__(self, path: Path, reason: str, record: int | None = None) -> None:
        where = f"{path}, record {record}" if record is not None else str(path)
        super().__init__(f"{where}: {reason}. Nothing was changed; bring the file back from a backup")
        self.path, self.reason, self.record = path, reason, record
