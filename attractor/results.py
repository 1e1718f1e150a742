"""A result is a JSON file that says what was computed, with what, from which code and on which machine."""

import functools
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from attractor.files import finite, write_text
from attractor.version import __version__

LIST_OF_NUMBERS = re.compile(r"\[\n[^][{}\"]*\]")
"""A list in indented JSON; a line break never stands inside of a string."""


def provenance() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    given = os.environ.get("ATTRACTOR_COMMIT")  # where a copy of the code has no history
    return {
        "commit": given or _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": None if given else bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {
            "attractor": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "gpu": gpu,
            "cpu_threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
    }


@functools.cache  # of the code that runs, even if another commit is made meanwhile
def _git(*arguments: str) -> str:
    """Empty outside a checkout: an installed package has no commit."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_result(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(finite({**values, "provenance": provenance()}), indent=2, allow_nan=False)
    write_text(path, LIST_OF_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")
