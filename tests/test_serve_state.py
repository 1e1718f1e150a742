"""What records make of sources, against an oracle in NumPy and plain dicts."""

import copy
import hashlib
import json

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from attractor.serve import state as module
from attractor.serve.segments import Record
from attractor.serve.state import State, apply, digest

MOST = 5  # answers and lines of history
DTYPES = {"bank": "torch.float32", "half": "torch.bfloat16", "steps": "torch.int64", "scale": "torch.float32"}


def blank():
    return {
        "bank": torch.tensor([[0.0, -0.0], [1.0, 2.0], [3.0, 4.0]]),
        "half": torch.ones(2, 1, 2, dtype=torch.bfloat16),
        "steps": torch.zeros(3, dtype=torch.int64),
        "scale": torch.tensor(1.0),
    }


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(module, "MOST_ANSWERS", MOST)
    monkeypatch.setattr(module, "MOST_HISTORY", MOST)


def array(tensor):
    """The bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().copy()
    return tensor.numpy().copy()


class Oracle:
    """Every version there was, written down as the records say."""

    def __init__(self):
        self.versions = [{"version": 0, "sources": {}, "answers": [], "history": []}]

    @property
    def last(self):
        return len(self.versions) - 1

    def apply(self, kind, told, tensors):
        now = copy.deepcopy(self.versions[-1])
        now["version"] = number = self.last + 1
        line = {"version": number, "kind": kind, "at": told["at"]}
        if kind == "rollback":
            now["sources"] = copy.deepcopy(self.versions[told["to"]]["sources"])
            line["to"] = told["to"]
        else:
            line["source"] = told["source"]
        if kind == "drop":
            now["sources"].pop(told["source"])
        if kind == "lesson":
            fresh = {name: array(value) for name, value in blank().items()}
            arrays, _ = now["sources"].get(told["source"], (fresh, None))
            for full, value in tensors.items():
                what, name = full.split("/")
                if what == "whole":
                    arrays[name] = array(value)
                elif what == "rows":
                    for place, row in enumerate(value.tolist()):
                        arrays[name][row] = array(tensors[f"values/{name}"])[place]
            now["sources"][told["source"]] = (arrays, copy.deepcopy(told["fields"]))
            line["loss"], line["patches"] = told["answer"]["loss"], 3
        now["history"] = [*now["history"], line][-MOST:]
        if told["key"] is not None:
            others = [pair for pair in now["answers"] if pair[0] != told["key"]]
            now["answers"] = [*others, [told["key"], told["answer"]]][-MOST:]
        self.versions.append(now)

    def digest(self, version):
        now = self.versions[version]
        fields = {source: own for source, (_, own) in now["sources"].items()}
        about = [version, fields, now["answers"], now["history"]]
        found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        lines = {
            json.dumps([source, name]): (DTYPES[name], value)
            for source, (arrays, _) in now["sources"].items()
            for name, value in arrays.items()
        }
        for key, (dtype, value) in sorted(lines.items()):
            found.update(f"{key} {dtype} {value.shape}\n".encode() + value.tobytes())
        return found.hexdigest()

    def compare(self, state):
        now = self.versions[state.version]
        assert (list(map(list, state.answers.items())), state.history) == (now["answers"], now["history"])
        assert state.sources.keys() == now["sources"].keys()
        for source, (arrays, fields) in now["sources"].items():
            own = state.sources[source]
            assert own.fields == fields
            assert own.tensors.keys() == arrays.keys()
            for name, value in arrays.items():
                assert str(own.tensors[name].dtype) == DTYPES[name]
                assert own.tensors[name].shape == value.shape
                assert array(own.tensors[name]).tobytes() == value.tobytes()
        assert digest(state) == self.digest(state.version)


OPERATIONS = st.tuples(
    st.sampled_from(["lesson"] * 5 + ["drop", "rollback", "rollback"]), st.integers(0, 99), st.integers(0, 99)
)


def record_for(oracle, operation, number):
    """The record that an operation is, given what there is: sources, shapes, versions."""
    kind, one, two = operation
    sources = oracle.versions[-1]["sources"]
    told = {"key": None if one % 3 == 0 else f"key {one % 9}", "at": f"2026-01-01T00:00:{number % 60:02}Z"}
    told["answer"] = {"n": number}
    if kind == "rollback":
        return kind, told | {"to": two % (oracle.last + 1)}, {}
    if kind == "drop" and sources:
        return kind, told | {"source": sorted(sources)[two % len(sources)]}, {}
    source = ["kjv", "folio", "python/rust"][one % 3]
    told |= {"source": source, "fields": {"tokens": number, "history": [one, two]}}
    told["answer"] |= {"loss": number / 8, "patches": {"0": [1, 2], "3": [0]}, "text": "no number"}
    arrays, _ = sources.get(source) or ({name: array(value) for name, value in blank().items()}, {})
    chance = np.random.default_rng([one, two])
    rows, tensors = len(arrays["bank"]), {}
    if two % 4 == 0:
        rows = 1 + one % 5
        tensors["whole/bank"] = torch.from_numpy(chance.normal(size=(rows, 2)).astype(np.float32))
        tensors["whole/steps"] = torch.from_numpy(chance.integers(0, 9, rows))
    elif two % 4 == 1:
        for name, width in (("bank", (2,)), ("steps", ())):
            chosen = torch.from_numpy(chance.permutation(len(arrays[name]))[: one % 3])
            values = torch.from_numpy(chance.integers(-9, 9, (len(chosen), *width)))
            tensors |= {f"rows/{name}": chosen, f"values/{name}": values.to(blank()[name].dtype) * 1}
    elif two % 4 == 2:  # equal to blank's numbers, and not the same
        tensors |= {"rows/half": torch.tensor([1]), "values/half": torch.full((1, 1, 2), -0.0).bfloat16()}
        tensors |= {"rows/bank": torch.tensor([0]), "values/bank": torch.tensor([[-0.0, 0.0]])}
        tensors["whole/scale"] = torch.tensor(float(one))
    return "lesson", told, tensors


@settings(max_examples=120)
@given(st.lists(OPERATIONS, max_size=25))
def test_against_the_oracle(operations):
    oracle, state = Oracle(), State()
    states = [copy.deepcopy(state)]
    for number, operation in enumerate(operations, 1):
        kind, told, tensors = record_for(oracle, operation, number)
        oracle.apply(kind, told, tensors)
        given_tensors = {name: value.clone() for name, value in tensors.items()}
        apply(state, Record(number, kind, told, tensors), blank, states.__getitem__)
        oracle.compare(state)
        states.append(copy.deepcopy(state))
        assert all(value.equal(tensors[name]) for name, value in given_tensors.items())
    for each in states:  # nothing else was changed on the way
        oracle.compare(each)


def lesson(**changes):
    told = {"source": "kjv", "key": "a", "answer": {}, "fields": {}, "at": "2026-01-01T00:00:00Z"}
    return {name: value for name, value in (told | changes).items() if value is not ...}


ROWS = torch.tensor([0, 2])
VALUES = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("kind", "told", "tensors", "message"),
    [
        ("forget", {}, {}, "kind 'forget'"),
        ("lesson", lesson(at=...), {}, "has the fields"),
        ("lesson", lesson(more=1), {}, "has the fields"),
        ("lesson", lesson(key=3), {}, "key=3"),
        ("lesson", lesson(answer=None), {}, "answer must be"),
        ("lesson", lesson(source=""), {}, "source=''"),
        ("lesson", lesson(fields=[]), {}, r"fields=\[\]"),
        ("lesson", lesson(), {"rows/other": ROWS, "values/other": VALUES}, "with the name of a tensor"),
        ("lesson", lesson(), {"part/bank": VALUES}, "with the name of a tensor"),
        ("lesson", lesson(), {"rows/bank": ROWS}, "has no values/bank"),
        ("lesson", lesson(), {"values/bank": VALUES}, "needs rows/bank"),
        ("lesson", lesson(), {"rows/bank": ROWS.int(), "values/bank": VALUES}, "needs rows/bank"),
        ("lesson", lesson(), {"rows/bank": ROWS, "values/bank": VALUES[:1]}, "cannot be"),
        ("lesson", lesson(), {"rows/bank": ROWS, "values/bank": VALUES[:, :1]}, "cannot be"),
        ("lesson", lesson(), {"rows/bank": ROWS + 1, "values/bank": VALUES}, "from 1 to 3 of 3"),
        ("lesson", lesson(), {"rows/bank": ROWS - 1, "values/bank": VALUES}, "from -1 to 1 of 3"),
        ("lesson", lesson(), {"rows/bank": ROWS * 0, "values/bank": VALUES}, "twice"),
        ("lesson", lesson(), {"rows/scale": ROWS, "values/scale": VALUES}, "cannot be"),
        ("lesson", lesson(), {"rows/bank": ROWS, "values/bank": VALUES.double()}, "float64"),
        ("lesson", lesson(), {"rows/bank": ROWS, "values/bank": VALUES / 0}, "not finite"),
        ("lesson", lesson(), {"whole/bank": VALUES * float("nan")}, "not finite"),
        ("lesson", lesson(), {"whole/bank": torch.tensor([[1e38, float("inf")], [0, 0]])}, "not finite"),
        ("lesson", lesson(), {"whole/steps": VALUES}, "float32"),
        ("lesson", lesson(), {"whole/bank": VALUES, "values/bank": VALUES}, "as rows and as a whole"),
        ("drop", lesson(fields=..., source="folio"), {}, "no source 'folio'"),
        ("drop", lesson(fields=...), {"whole/bank": VALUES}, "has no tensors"),
        ("rollback", lesson(fields=..., source=..., to=2), {}, "to=2"),
        ("rollback", lesson(fields=..., source=..., to=-1), {}, "to=-1"),
        ("rollback", lesson(fields=..., source=..., to=True), {}, "to=True"),
        ("rollback", lesson(fields=..., source=..., to="1"), {}, "to='1'"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(kind, told, tensors, message):
    state = State()
    first = {"rows/bank": ROWS, "values/bank": VALUES}
    apply(state, Record(1, "lesson", lesson(), first), blank, None)
    before = digest(state)
    with pytest.raises(ValueError, match=message):
        apply(state, Record(2, kind, told, tensors), blank, None)
    with pytest.raises(ValueError, match="record 3 does not follow version 1"):
        apply(state, Record(3, "lesson", lesson(), {}), blank, None)
    assert digest(state) == before


def test_large_numbers_are_finite():
    """Though their sum is not."""
    state = State()
    large = torch.full((3, 2), 3e38)
    apply(state, Record(1, "lesson", lesson(), {"whole/bank": large}), blank, None)
    assert state.sources["kjv"].tensors["bank"].equal(large)


def test_the_digest_tells_everything_apart():
    def state(**changes):
        told = {"source": "kjv", "name": "bank", "value": VALUES, "fields": {}, "answers": {}, "history": []}
        told |= changes
        own = module.SourceState({told["name"]: told["value"]}, told["fields"])
        return State(1, {told["source"]: own}, told["answers"], told["history"])

    states = [
        State(), State(1), State(2), state(), state(source="bank", name="kjv"), state(value=-VALUES),
        state(value=VALUES.view(4)), state(value=VALUES.view(torch.int32)), state(value=VALUES * 0),
        state(value=-(VALUES * 0)), state(fields={"a": 1}), state(answers={"a": {}}),
        state(answers={"a": {}, "b": {}}), state(answers={"b": {}, "a": {}}), state(history=[{"version": 1}]),
    ]  # fmt: skip
    assert len({digest(each) for each in states}) == len(states)
    assert digest(state(fields={"a": 1, "b": 2})) == digest(state(fields={"b": 2, "a": 1}))
