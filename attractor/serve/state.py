"""What lessons have made of a base: plain data that records change, one version each.

A version is the number of the record that made it; version 0 is the base alone. Kinds of records:

    lesson      fields source, key, answer, fields, at; tensors rows/NAME and values/NAME: these rows of a
                tensor as they are now, whole/NAME: the tensor as it is now, of any shape
    drop        fields source, key, answer, at: the source is gone
    rollback    fields to, key, answer, at: the sources are as they were at version `to`

What was answered once stays known by its key, and history goes on, whatever is dropped or rolled back.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.checkpoint import tensors_hash
from attractor.serve.segments import Record

MOST_ANSWERS = 4096
MOST_HISTORY = 4096
FIELDS = {
    "lesson": {"source", "key", "answer", "fields", "at"},
    "drop": {"source", "key", "answer", "at"},
    "rollback": {"to", "key", "answer", "at"},
}

Tensors = Mapping[str, Tensor]
Blank = Callable[[], Tensors]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class SourceState:
    tensors: dict[str, Tensor]
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fresh(cls, blank: Tensors) -> "SourceState":
        """With tensors of its own."""
        return cls({name: value.detach().cpu().clone() for name, value in blank.items()})

    def copy(self) -> "SourceState":
        return SourceState({name: value.clone() for name, value in self.tensors.items()}, self.fields)


@dataclass
class State:
    version: int = 0
    sources: dict[str, SourceState] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key; the oldest leave first
    history: list[dict[str, Any]] = field(default_factory=list)  # a line for each version, the newest last


def apply(state: State, record: Record, blank: Blank, state_at: Callable[[int], State]) -> None:
    """Make the state the one that the record says. A ValueError changes nothing."""
    if record.sequence != state.version + 1:
        raise ValueError(f"record {record.sequence} does not follow version {state.version}")
    if record.kind == "rollback":
        check(record, {}, {})
        earlier = state_at(record.fields["to"])
        state.sources = {source: own.copy() for source, own in earlier.sources.items()}
    else:
        change(state.sources, record, blank())
    note(state, record)


# --- what a record may be


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check(record: Record, known: Mapping[str, Shapes], blank: Tensors) -> None:
    """A ValueError for what `change` and `note` could not do to sources whose tensors have these shapes."""
    kind, told = record.kind, record.fields
    if kind not in FIELDS:
        raise ValueError(f"a record of kind {kind!r}; there are {', '.join(FIELDS)}")
    if told.keys() != FIELDS[kind]:
        raise ValueError(f"a {kind} has the fields {sorted(FIELDS[kind])}, not {sorted(told)}")
    if not isinstance(told["key"], str | None):
        raise ValueError(f"key={told['key']!r} must be a string or None")
    if not isinstance(told["answer"], dict) or not isinstance(told["at"], str):
        raise ValueError(f"answer must be a dict and at a time, not {told['answer']!r} and {told['at']!r}")
    if kind == "rollback":
        to = told["to"]
        if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to < record.sequence:
            raise ValueError(f"to={to!r} must be a version from 0 to {record.sequence - 1}")
    elif not isinstance(told["source"], str) or not told["source"]:
        raise ValueError(f"source={told['source']!r} must be a name")
    if kind == "drop" and told["source"] not in known:
        raise ValueError(f"there is no source {told['source']!r} to drop")
    if kind == "lesson":
        if not isinstance(told["fields"], dict):
            raise ValueError(f"fields={told['fields']!r} must be a dict")
        check_tensors(record.tensors, known.get(told["source"]) or shapes(blank), blank)
    elif record.tensors:
        raise ValueError(f"a {kind} has no tensors, and there are {sorted(record.tensors)[:4]}")


def check_tensors(tensors: Tensors, now: Shapes, blank: Tensors) -> None:
    for full, value in tensors.items():
        what, _, name = full.partition("/")
        if what not in ("rows", "values", "whole") or name not in blank:
            raise ValueError(f"{full!r} is not rows/, values/ or whole/ with the name of a tensor")
        if what == "whole" and f"values/{name}" in tensors:
            raise ValueError(f"{name} is there as rows and as a whole")
        if what == "rows":
            if f"values/{name}" not in tensors:
                raise ValueError(f"rows/{name} has no values/{name}")
            continue
        if value.dtype != blank[name].dtype:
            raise ValueError(f"{full} is {value.dtype}, and the tensor {blank[name].dtype}")
        if value.is_floating_point() and not is_finite(value):
            raise ValueError(f"{full} holds numbers that are not finite")
        if what == "values":
            check_rows(name, tensors.get(f"rows/{name}"), value, now[name])


def check_rows(name: str, rows: Tensor | None, values: Tensor, shape: tuple[int, ...]) -> None:
    if rows is None or rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"values/{name} needs rows/{name}: whole numbers (int64), one for each row")
    if not shape or tuple(values.shape) != (len(rows), *shape[1:]):
        raise ValueError(f"{len(rows)} rows of {name} {shape} cannot be {tuple(values.shape)}")
    if len(rows):
        numbers = rows.numpy(force=True)
        if not (numbers[1:] > numbers[:-1]).all():  # the usual case needs no sorting
            numbers = np.sort(numbers)
            if not (numbers[1:] > numbers[:-1]).all():
                raise ValueError(f"rows of {name} are named twice")
        if not 0 <= numbers[0] <= numbers[-1] < shape[0]:
            raise ValueError(f"rows of {name} go from {numbers[0]} to {numbers[-1]} of {shape[0]}")


def is_finite(value: Tensor) -> bool:
    """One number that is not finite makes a sum that is not; only then every number has to be looked at."""
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def reshaped(known: Mapping[str, Shapes], kind: str, source: str, now: Shapes) -> Mapping[str, Shapes]:
    """The sources and the shapes of their tensors after a lesson that made them so, or after a drop.

    Where nothing is different, it is `known` itself.
    """
    if kind == "drop":
        return {name: own for name, own in known.items() if name != source}
    return known if known.get(source) == now else {**known, source: now}


# --- what a record does


def change(sources: dict[str, SourceState], record: Record, blank: Tensors) -> None:
    """What a lesson or a drop does to the sources. A ValueError changes nothing."""
    source = str(record.fields.get("source"))
    check(record, {source: shapes(sources[source].tensors)} if source in sources else {}, blank)
    if record.kind == "drop":
        del sources[source]
        return
    if source not in sources:
        sources[source] = SourceState.fresh(blank)
    own = sources[source]
    write(own.tensors, record.tensors)
    own.fields = record.fields["fields"]


def write(own: dict[str, Tensor], tensors: Tensors) -> None:
    for full, value in tensors.items():
        what, _, name = full.partition("/")
        if what == "values":
            own[name].index_copy_(0, tensors[f"rows/{name}"], value)
        elif what == "whole":
            own[name] = value.detach().cpu().clone()


def note(state: State, record: Record) -> None:
    """What stays of a record whatever comes later: its answer, and a line of history."""
    told, answer = record.fields, record.fields["answer"]
    line = {"version": record.sequence, "kind": record.kind}
    line |= {name: told[name] for name in ("source", "to", "at") if name in told}
    line |= {name: answer[name] for name in ("loss", "tokens") if isinstance(answer.get(name), int | float)}
    patches = answer.get("patches")
    if isinstance(patches, dict):
        line["patches"] = sum(len(numbers) for numbers in patches.values() if isinstance(numbers, list))
    elif isinstance(patches, int):
        line["patches"] = patches
    state.history.append(line)
    del state.history[:-MOST_HISTORY]
    if told["key"] is not None:
        state.answers.pop(told["key"], None)  # should it come again, it is the newest
        state.answers[told["key"]] = answer
        while len(state.answers) > MOST_ANSWERS:
            del state.answers[next(iter(state.answers))]
    state.version = record.sequence


def digest(state: State) -> str:
    """SHA-256 of everything: of a JSON list [version, {source: fields}, [[key, answer], ...], history], then
    of each tensor in the order of JSON lists [source, name]: that list, type, shape, a newline, the bytes."""
    fields = {source: own.fields for source, own in state.sources.items()}
    about = [state.version, fields, list(state.answers.items()), state.history]
    tensors = {
        json.dumps([source, name]): value
        for source, own in state.sources.items()
        for name, value in own.tensors.items()
    }
    return tensors_hash(tensors, json.dumps(about, sort_keys=True))
