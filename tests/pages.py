"""The pages of the documentation, and the blocks of code in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "LOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""All that the site is made of."""


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"

    def commands(self) -> list[str]:
        """What a shell would run, one by one, each as it is written."""
        found, waiting = [], ""
        for line in self.text.splitlines(keepends=True):
            waiting += line
            if waiting.endswith("\\\n"):
                continue
            try:
                given = words(waiting)
            except ValueError:  # a quotation goes on
                continue
            found += [waiting] if given else []
            waiting = ""
        assert not waiting, f"{self} ends within a quotation"
        return found


def words(command: str) -> list[str]:
    """As the shell would hand them over."""
    return shlex.split(command.replace("\\\n", " "), comments=True)


def blocks(*languages: str) -> Iterator[Block]:
    """From fence to fence: what closes one does not open the next."""
    for page in PAGES:
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, (language, text) in enumerate(fences, 1):
            if not languages or language in languages:
                yield Block(page.name, number, language, text)
