"""Lessons and the sources that taught them, as clients read of them."""

from typing import Any

from attractor.continual.lessons import Lesson

FORMS = ("forms", "taken_in")
COUNTED = ("tokens", "bytes", "patches")
"""Figures of lessons that are summed for each source."""


def figures_of(lesson: Lesson, fields: dict[str, Any]) -> dict[str, Any]:
    """What became of a lesson, in numbers; `fields` are what its record adds."""
    count = len(lesson.forms + lesson.taken_in)
    figures = {
        "lesson": lesson.number,
        "known": lesson.known == 1,
        "share_known_before": lesson.known_before,
        "share_known": lesson.known,
        "passes": lesson.passes,
        "patches": lesson.patches,
        "overrides": list(lesson.overrides),
        "seconds": lesson.seconds,
        **fields,
    }
    if not figures["known"]:
        figures["reason"] = (
            f"{round((1 - lesson.known) * count)} of {count} forms are not completed as they were taught: "
            "give more forms, or a subject that stands in all of them"
        )
    return figures


class Catalogue:
    """The writer changes it; others look at `shown`, which is replaced."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.known = 0  # of the entries
        self.show()

    def add(self, lesson: Lesson, source: str, fields: dict[str, Any], version: int) -> None:
        self.remove(lesson.number)
        entry = {
            **figures_of(lesson, fields),
            "subject": lesson.subject,
            "source": source,
            "version": version,
            **{name: [list(form) for form in getattr(lesson, name)] for name in FORMS},
        }
        self.entries[lesson.number] = entry
        self._count(entry, 1)
        self.sources[source]["version"] = version

    def remove(self, number: int) -> None:
        if (entry := self.entries.pop(number, None)) is not None:
            self._count(entry, -1)

    def _count(self, entry: dict[str, Any], by: int) -> None:
        name = entry["source"]
        self.known += by * entry["known"]
        now = dict(self.sources.get(name, {"version": 0, "lessons": 0, **dict.fromkeys(COUNTED, 0)}))
        now["lessons"] += by
        for figure in COUNTED:
            now[figure] += by * entry[figure]
        self.sources[name] = now
        if not now["lessons"]:
            del self.sources[name]

    def show(self) -> None:
        self.shown = dict(self.entries)


def searched(
    shown: dict[int, dict[str, Any]],
    *,
    search: str | None = None,
    source: str | None = None,
    after: str | None = None,
    before: str | None = None,
) -> list[dict[str, Any]]:
    """Lessons, the newest first: with this text in their words, of this source, taught in this time."""
    wanted = None if search is None else search.casefold()
    return [
        entry
        for _, entry in sorted(shown.items(), reverse=True)
        if (source is None or entry["source"] == source)
        and (after is None or entry["at"] >= after)
        and (before is None or entry["at"] < before)
        and (wanted is None or wanted in words_of(entry).casefold())
    ]


def words_of(entry: dict[str, Any]) -> str:
    return "\n".join([entry["subject"], *("".join(form) for name in FORMS for form in entry[name])])
