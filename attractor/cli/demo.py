"""attractor demo"""

import sys
from dataclasses import dataclass
from pathlib import Path

from attractor import presets
from attractor.cli.common import Device, dataset_of, progress_bar
from attractor.config import check_size


def say(line: str) -> None:
    """A line above the bar; the standard output is for the result."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


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
        with progress_bar(len(demo.MODELS) * self.steps, "demo") as report:
            result = demo.run(self.out, dataset, steps=self.steps, device=self.device, report=report, say=say)
        parts = (demo.story_lines, demo.table, demo.routing_table, demo.adaptation_table, demo.samples)
        print(*(part(result) for part in parts), sep="\n\n")
        if (school := self.out / "school").is_dir():
            print(f'\nTry it yourself: attractor ask {school} "What is Skelderby famous for?"')
        print(f"\nThe report, with curves and charts: {(self.out / 'report.html').resolve().as_uri()}")
