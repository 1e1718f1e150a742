"""What an OnlineLearner needs to go on, beside its model: tensors and JSON, files, and back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attractor.continual.allocate import Habits
from attractor.continual.observation import Totals, whole_number
from attractor.files import check_hashes, parse_json, save_tensors

if TYPE_CHECKING:
    from attractor.continual.learner import OnlineLearner

STATE, TENSORS = "learner.json", "learner.safetensors"
Learner = TypeVar("Learner", bound="OnlineLearner")


def write(learner: "OnlineLearner", folder: Path) -> None:
    """Write the model, its tokenizer, and all that learning needs to go on."""
    learner.model.save_pretrained(folder)
    if learner.tokenizer is not None:
        learner.tokenizer.save(folder / "tokenizer.json")
    save_tensors(tensors_of(learner), folder / TENSORS)
    (folder / STATE).write_text(json.dumps(fields_of(learner), indent=2))


def read(folder: Path, device: torch.device | str, make: Callable[[dict[str, Any]], Learner]) -> Learner:
    """A new learner by `make`, given the options it was saved with, and everything that was kept of it."""
    try:
        check_hashes(folder)
        state = parse_json((folder / STATE).read_text())
        tensors = load_file(folder / TENSORS, device=str(device))
        learner = make(state["config"])
        restore(learner, state, tensors)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        OSError,
        SafetensorError,
    ) as error:
        raise ValueError(f"{folder} holds a damaged learner: {error!r}") from error
    return learner


def tensors_of(learner: "OnlineLearner") -> dict[str, Tensor]:
    """The optimizer's moments and counts, and how patches are used; the tensors themselves."""
    habits = learner.allocator.habits
    tensors = {f"update.{key}": value for key, value in learner.update.state_dict().items()}
    tensors |= {f"usage.{number}": own.usage for number, own in habits.items()}
    return tensors | {f"born.{number}": own.born for number, own in habits.items()}


def counters_of(learner: "OnlineLearner") -> dict[str, Any]:
    """The rest that changes with what is learned, as JSON."""
    habits = learner.allocator.habits
    totals = {**vars(learner.totals), "surprise": list(learner.totals.surprise)}
    return {
        "totals": totals,
        "most": {str(number): most for number, most in learner.allocator.most.items()},
        "unfamiliar": {str(number): own.unfamiliar for number, own in habits.items()},
        "allocated": {str(number): own.allocated for number, own in habits.items()},
    }


def fields_of(learner: "OnlineLearner") -> dict[str, Any]:
    """Return all of a learner's state that is not a tensor, as JSON."""
    return {
        **counters_of(learner),
        "config": learner.config.to_dict(),
        "history": learner.history.tolist(),
        "source": learner.source,
        "notes": learner.notes,
    }


def restore(learner: "OnlineLearner", state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The checks are as strict as a file of unknown origin needs; nothing changes before they pass."""
    own = {k.removeprefix("update."): v for k, v in tensors.items() if k.startswith("update.")}
    if not all(value.isfinite().all() for value in tensors.values()):
        raise ValueError("numbers that are not finite")
    habits = {}
    for number, layer in learner.layers.items():
        key, usage, born = str(number), tensors[f"usage.{number}"], tensors[f"born.{number}"]
        if usage.shape != (layer.num_patches,) or born.shape != (layer.num_patches,):
            raise ValueError(f"the usage of layer {number} does not fit its {layer.num_patches} patches")
        known = learner.allocator.habits[number]
        habits[number] = Habits(
            usage.to(known.usage),
            born.to(known.born),
            whole_number(state["unfamiliar"][key]),
            whole_number(state["allocated"][key], least=-(2**62)),
        )
    totals = Totals.from_dict(state["totals"])
    history = np.asarray(state["history"], dtype=np.int64)[-learner.model.config.context :]
    if len(history):
        history = learner._tokens(history)
    if not isinstance(state["notes"], dict) or not isinstance(state["source"], str | None):
        raise ValueError("notes or source of the wrong type")
    most = {number: whole_number(state["most"][str(number)], least=1) for number in learner.layers}
    learner.update.load_state_dict(own)
    if learner.config.allocation.most_patches is None:
        learner.allocator.most = most
    learner.allocator.habits, learner.totals, learner.history = habits, totals, history
    learner.source, learner.notes = state["source"], state["notes"]
