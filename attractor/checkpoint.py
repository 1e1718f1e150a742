"""Checkpoint folders that appear whole or not at all.

A run keeps `checkpoints/last-STEP` (everything needed to go on) and `checkpoints/best-STEP` (the model). A
folder is filled under a temporary name, flushed to the disk and renamed; the one it replaces is removed only
then. So a kill at any moment leaves the previous checkpoint, the new one, or both. Tensors are safetensors,
the rest is JSON: nothing in a checkpoint is executed by loading it.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from attractor.distributed import World
from attractor.files import (
    check_hashes,
    parse_json,
    recover_folder,
    remove_folder,
    save_tensors,
    write_folder,
)
from attractor.lm import TrainableModel
from attractor.model import GPT
from attractor.tokenizer import Tokenizer, load

log = logging.getLogger("attractor")

FOLDER = re.compile(r"(last|best)-(\d+)")


def tensors_hash(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Hash every name, type, shape and byte, and what is said `about` them."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run: the newest of each kind."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoints"
        for replaced in self.folder.glob(".replaced-*"):
            recover_folder(self.folder / replaced.name.removeprefix(".replaced-"))

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
        for left in (".partial-*", ".replaced-*"):  # by a killed process
            for stale in self.folder.glob(left):
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
    for folder in (path, path / "learner"):  # what `attractor adapt` writes
        if folder.name:
            recover_folder(folder)
        if (folder / "model.safetensors").is_file():
            return folder
    checkpoints = Checkpoints(path)
    newest = checkpoints.newest("best") or checkpoints.newest("last")
    if newest is None:
        raise ValueError(f"{path} holds neither a saved model nor the checkpoints of a run")
    return newest


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", model: TrainableModel | None = None
) -> tuple[Path, TrainableModel, Tokenizer | None]:
    """Load a run, a checkpoint or a saved model: its folder, the model, and its tokenizer if it has one.

    With a `model` none is read: only what was saved beside it, such as the state of a learner.
    """
    if model is None:
        folder = find_model(path)
        model = GPT.from_pretrained(folder, device=device)
    else:
        folder = Path(path) / "learner" if (Path(path) / "learner").is_dir() else Path(path)
        recover_folder(folder)
    tokens = folder / "tokenizer.json"
    return folder, model, load(tokens) if tokens.is_file() else None


State = dict[str, Any]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gather_model(model: nn.Module) -> State:
    """The model's tensors: whole, in the leader."""
    return get_model_state_dict(model, options=WHOLE)


def gather_training(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> State:
    """The tensors of the optimizer and of the random generators: whole, in the leader."""
    moments: State = get_optimizer_state_dict(model, optimizer, options=WHOLE).get("state", {})  # type: ignore[assignment]
    training = {f"optimizer.{name}.{key}": value for name in moments for key, value in moments[name].items()}
    training["random.cpu"] = world.stack(torch.get_rng_state())
    if torch.cuda.is_available():
        training["random.cuda"] = world.stack(torch.cuda.get_rng_state())
    return training


def spread_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, state: State, training: State
) -> None:
    """Undo both in place, with any number of processes; only what the leader gives counts."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
    random = world.from_leader(lambda: {k: v for k, v in training.items() if k.startswith("random.")})
    moments: State = {}
    for key in training.keys() - random.keys():
        name, part = key.removeprefix("optimizer.").rsplit(".", 1)
        moments.setdefault(name, {})[part] = training[key]
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(
        model, optimizer, {"state": moments, "param_groups": groups} if moments else {}, options=options
    )
    if len(random["random.cpu"]) != world.size:
        message = "%d processes saved this and %d go on: dropout takes other random numbers from here"
        log.warning(message, len(random["random.cpu"]), world.size)
        return
    own = {name: states[world.rank].clone() for name, states in random.items()}  # torch crashes on a view
    torch.set_rng_state(own["random.cpu"])
    if "random.cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["random.cuda"])


def write_training(folder: Path, tensors: State, progress: dict[str, Any]) -> None:
    save_tensors(tensors, folder / "training.safetensors")
    (folder / "training.json").write_text(json.dumps(progress, indent=2))


def read_training(folder: Path) -> tuple[State, dict[str, Any]]:
    try:
        check_hashes(folder)
        return load_file(folder / "training.safetensors"), parse_json((folder / "training.json").read_text())
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"cannot resume from {folder}: {error}") from error
