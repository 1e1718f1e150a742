"""Checkpoint folders that appear whole or not at all.

A run keeps `checkpoints/last-STEP` (everything needed to go on) and `checkpoints/best-STEP` (the model). A
folder is filled under a temporary name, flushed to the disk and renamed; the one it replaces is removed only
then. So a kill at any moment leaves the previous checkpoint, the new one, or both. Tensors are safetensors,
the rest is JSON: nothing in a checkpoint is executed by loading it.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FOLDER = re.compile(r"(last|best)-(\d+)")


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` with an empty folder, flush what it wrote, and make it appear as `target`."""
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        if target.exists():
            remove_folder(target)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(target.parent)


def remove_folder(folder: Path) -> None:
    """Rename, then delete: a kill in between never leaves half a folder under its real name."""
    doomed = folder.with_name(f".partial-removed-{folder.name}-{os.getpid()}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints:
    """The checkpoints of one run: the newest of each kind."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoints"

    def newest(self, kind: str) -> Path | None:
        found = self._steps(kind)
        return self.folder / f"{kind}-{max(found):08d}" if found else None

    def has(self, kind: str, step: int) -> bool:
        return step in self._steps(kind)

    def save(self, kind: str, step: int, fill: Callable[[Path], None]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"{kind}-{step:08d}"
        write_folder(target, fill)
        for old in self._steps(kind) - {step}:
            remove_folder(self.folder / f"{kind}-{old:08d}")
        for stale in self.folder.glob(".partial-*"):  # what a killed process left
            shutil.rmtree(stale, ignore_errors=True)
        return target

    def _steps(self, kind: str) -> set[int]:
        if not self.folder.is_dir():
            return set()
        matches = [FOLDER.fullmatch(path.name) for path in self.folder.iterdir()]
        return {int(match[2]) for match in matches if match and match[1] == kind}


def find_model(path: str | Path) -> Path:
    """The folder to load from: the best model of a run (else its last), a checkpoint, or a saved model."""
    path = Path(path)
    if (path / "model.safetensors").is_file():
        return path
    checkpoints = Checkpoints(path)
    folder = checkpoints.newest("best") or checkpoints.newest("last")
    if folder is None:
        raise ValueError(f"{path} holds neither a saved model nor the checkpoints of a run")
    return folder


def save_training_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Optimizer and random state as safetensors, the loop's own counters as JSON."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / "training.safetensors")
    (folder / "training.json").write_text(json.dumps(progress, indent=2))


def load_training_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Undo `save_training_state` in place; returns the counters."""
    try:
        tensors = load_file(folder / "training.safetensors")
        progress = json.loads((folder / "training.json").read_text())
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot resume from {folder}: {error}") from error
    torch.set_rng_state(tensors.pop("random.cpu"))
    cuda: Tensor | None = tensors.pop("random.cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, part = key.removeprefix("optimizer.").rsplit(".", 1)
        if name not in parameters:
            raise ValueError(f"cannot resume from {folder}: the model has no parameter {name!r}")
        optimizer.state[parameters[name]][part] = value.to(parameters[name].device)
    return progress
