"""A guarded learner in a folder: the base, guard.json, and for every overlay its versions."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attractor.continual import domains
from attractor.continual.gates import Surprise
from attractor.continual.observation import Totals, whole_number
from attractor.continual.overlay import Overlay
from attractor.files import check_hashes, parse_json

if TYPE_CHECKING:
    from attractor.continual.guarded import GuardedLearner, Source

STATE = "guard.json"
Learner = TypeVar("Learner", bound="GuardedLearner")


def write(learner: "GuardedLearner", folder: Path) -> None:
    learner.base.save_pretrained(folder)
    if learner.tokenizer is not None:
        learner.tokenizer.save(folder / "tokenizer.json")
    kept: dict[str, Any] = {}
    for name, held in learner.sources.items():
        held.branch.overlay(source=name, version=held.version).save(folder / "overlays" / name)
        for version, overlay in held.versions.items():
            overlay.save(folder / "overlays" / name / f"version-{version}")
        kept[name] = {
            "version": held.version,
            "tokens": held.tokens,
            "versions": sorted(held.versions),
            "last_used": held.last_used,
            "usual": list(held.usual),
            "recent": held.recent.tolist(),
        }
    state = {
        "config": learner.config.to_dict(),
        "sources": kept,
        "base": learner.base_hash,
        "notes": learner.notes,
        "totals": dataclasses.asdict(learner.totals),
        "usual": list(learner.usual),
        "unclaimed": [piece.tolist() for piece in learner.unclaimed],
        "consolidated": learner.consolidated,
        "context": learner.base.config.context,
    }
    (folder / STATE).write_text(json.dumps(state, indent=2))


def read(folder: Path, make: Callable[[dict[str, Any]], Learner]) -> Learner:
    """A new learner by `make`, given the options it was saved with, and everything that was kept of it."""
    try:
        check_hashes(folder)
        state = parse_json((folder / STATE).read_text())
        learner = make(state["config"])
        if learner.base_hash != state["base"]:
            raise ValueError("the base is not the one these overlays were made over")
        for name, kept in cast(Mapping[str, Any], state["sources"]).items():
            learner.check_name(name)
            learner.sources[name] = _source(learner, folder / "overlays" / name, kept)
        learner.consolidated = [str(name) for name in state["consolidated"]]
        learner.notes, learner.totals = dict(state["notes"]), Totals.from_dict(state["totals"])
        learner.usual = Surprise.from_list(state["usual"])
        learner.unclaimed = [learner.tokens_in(piece) for piece in state["unclaimed"]]
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(f"{folder} holds a damaged guarded learner: {error!r}") from error
    return learner


def _source(learner: "GuardedLearner", place: Path, kept: Mapping[str, Any]) -> "Source":
    held = learner.new_source(Overlay.load(place), whole_number(kept["tokens"]))
    held.version, held.last_used = whole_number(kept["version"]), whole_number(kept["last_used"])
    held.usual = domains.usual_in(kept["usual"])
    held.recent = learner.tokens_in(kept["recent"]) if kept["recent"] else held.recent
    held.versions = {
        version: Overlay.load(place / f"version-{version}") for version in map(whole_number, kept["versions"])
    }
    if held.versions and held.version not in held.versions:
        raise ValueError(f"version {held.version} of {place.name!r} is missing")
    for version in held.versions.values():
        held.branch.check(version)
        whole_number(version.notes.get("tokens"))
    return held
