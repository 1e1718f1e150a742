"""attractor demo"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attractor import presets
from attractor.cli.common import Device, dataset_of, progress_bar
from attractor.config import check_size


def say(line: str) -> None:
    """A line above the bar; the standard output is for the result."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


class training_bar:
    """A bar that begins with the first record of a training: the lessons before it are not in its time.

    What was done earlier is in none of its rates.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.bar: progress_bar | None = None

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.__exit__()

    def show(self, record: dict[str, Any]) -> None:
        if self.bar is None:
            self.bar = progress_bar(self.steps, "demo", initial=record["done"])
        self.bar.show(record)


@dataclass(kw_only=True)
class Demo:
    """Teach a model 15 facts, ask it, make it forget one; then compare a dense and an APN model.

    It takes a few minutes on two cores, and writes a report.
    """

    out: Path = Path("runs/demo")
    """Gets report.html, demo.json, the lessons and both runs; a demo that was stopped goes on from there."""
    steps: int = 240
    """Training steps of each model."""
    device: Device = None

    def run(self) -> None:
        from attractor import distributed

        check_size("steps", self.steps)
        distributed.parse_device(self.device)
        try:
            from attractor import demo
        except ImportError as missing:  # said now, and not after minutes of training
            raise ValueError(
                f"the demo draws its report with {missing.name}, which is not installed: "
                'pip install "attractor-patch-networks[cli,train]"'
            ) from missing
        dataset = dataset_of(presets.tiny_apn())
        with training_bar(len(demo.MODELS) * self.steps) as report:
            result = demo.run(self.out, dataset, steps=self.steps, device=self.device, report=report, say=say)
        parts = (demo.story_lines, demo.table, demo.routing_table, demo.adaptation_table, demo.samples)
        print(*(part(result) for part in parts), sep="\n\n")
        if (school := self.out / "school").is_dir():
            print(f'\nTry it yourself: attractor ask {school} "What is Skelderby famous for?"')
        print(f"\nThe report, with curves and charts: {(self.out / 'report.html').resolve().as_uri()}")
