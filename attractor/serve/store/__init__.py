"""What a server must not lose: every change in one SQLite database, and all that can be made of them."""

from attractor.serve.store.database import check_folder
from attractor.serve.store.records import Change
from attractor.serve.store.states import LessonState, SourceState, State
from attractor.serve.store.store import Store
from attractor.serve.store.tools import Report, backup, show, verify

__all__ = [
    "Change",
    "LessonState",
    "Report",
    "SourceState",
    "State",
    "Store",
    "backup",
    "check_folder",
    "show",
    "verify",
]
