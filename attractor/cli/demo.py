"""attractor demo"""

from dataclasses import dataclass
from pathlib import Path

from attractor import presets
from attractor.cli.common import Device, dataset_of, progress_bar
from attractor.config import check_size


@dataclass(kw_only=True)
class Demo:
    """Train a tiny dense and a tiny APN model, teach both something new, write a report: three minutes."""

    out: Path = Path("runs/demo")
    """Gets demo.json, report.html and both runs; a demo that was stopped goes on from there."""
    steps: int = 600
    """Training steps of each model."""
    device: Device = None
    """cpu, cuda, cuda:1, ..."""

    def run(self) -> None:
        from attractor import distributed

        check_size("steps", self.steps)
        distributed.parse_device(self.device)
        try:
            from attractor import demo
        except ImportError as missing:  # told now, and not after minutes of training
            raise ValueError(
                f"the demo draws its report with {missing.name}, which is not installed: "
                'pip install "attractor-patch-networks[cli,train]"'
            ) from missing
        dataset = dataset_of(presets.tiny_apn())
        with progress_bar(len(demo.MODELS) * self.steps, "demo") as report:
            result = demo.run(self.out, dataset, steps=self.steps, device=self.device, report=report)
        parts = (demo.table, demo.routing_table, demo.adaptation_table, demo.samples)
        print(*(part(result) for part in parts), sep="\n\n")
        print(f"\nThe report, with curves and charts: {(self.out / 'report.html').resolve().as_uri()}")
