"""attractor report RESULT.json ... [--out report.html] [--docs docs/results.md]"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from attractor.experiments import page, results_doc
from attractor.experiments.readings import read


@dataclass(kw_only=True)
class Report:
    """Show results: one HTML page from their JSON, and Markdown with figures where asked."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of experiments, in the order in which they are to be shown."""
    out: Path = Path("report.html")
    docs: Path | None = None
    """A Markdown page; its figures go to figures/ beside it, and what was written by hand in it stays."""

    def run(self) -> None:
        if not self.results:
            raise ValueError("no results given; name JSON files that `attractor experiment` wrote")
        results = [read(path) for path in self.results]
        files = {self.out: page.render(results)}
        if self.docs is not None:
            files |= results_doc.render(results, self.docs, self.out)
        results_doc.write(files)  # only now: a damaged result leaves what was there
        print("\n".join(f"written to {path}" for path in files))
