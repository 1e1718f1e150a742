"""Stores for tests: an oracle that writes every version down, and operations for both."""

import copy

import numpy as np
import torch

from attractor.continual.delta import Delta
from attractor.serve.store import Store

AT = "2026-01-01T00:00:00Z"


def blank():
    """What a source is before its first lesson."""
    return {
        "bank": torch.tensor([[0.0, -0.0], [1.0, 2.0], [3.0, 4.0]]),
        "half": torch.ones(2, 1, 2, dtype=torch.bfloat16),
        "steps": torch.zeros(3, dtype=torch.int64),
        "scale": torch.tensor(1.0),
    }


def array(tensor):
    """The bits."""
    return (
        (tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    )


class Oracle:
    """Every version there was: source -> arrays, fields and the version of its last lesson."""

    def __init__(self):
        self.versions = [{}]

    @property
    def last(self):
        return len(self.versions) - 1

    def apply(self, kind, columns):
        number = self.last + 1
        now = copy.deepcopy(self.versions[columns["target"] if kind == "rollback" else -1])
        source = columns.get("source")
        if kind == "lesson":
            arrays = now[source][0] if source in now else {n: array(x) for n, x in blank().items()}
            for name, value in columns["delta"].whole.items():
                arrays[name] = array(value)
            for name, (rows, values) in columns["delta"].rows.items():
                for row, value in zip(rows.tolist(), array(values), strict=True):
                    arrays[name][row] = value
            now[source] = (arrays, copy.deepcopy(columns["fields"]), number)
        elif kind != "rollback":
            now.pop(source, None)
        if kind == "erase":
            for version in self.versions:
                version.pop(source, None)
        self.versions.append(now)

    def compare(self, state):
        expected = self.versions[state.version]
        assert state.sources.keys() == expected.keys()
        for source, (arrays, fields, version) in expected.items():
            own, tensors = state.sources[source], blank()
            own.delta.apply(tensors)
            assert (own.fields, own.version) == (fields, version)
            for name, value in arrays.items():
                found = array(tensors[name])
                assert (found.shape, found.tobytes()) == (value.shape, value.tobytes())


def operation(oracle, kind, one, two):
    """What a drawn operation is, given what there is: its kind, and the columns of its record."""
    number = oracle.last + 1
    columns = {"answer": {"version": number}, "at": AT, "key": f"key {number}" if one % 2 else None}
    columns |= {"content": "a hash", "sender": "ann"} if one % 2 else {}
    if kind == "rollback":
        return kind, columns | {"target": two % number}
    sources = sorted(oracle.versions[-1])
    if kind != "lesson" and sources:
        return kind, columns | {"source": sources[two % len(sources)]}
    source = ["kjv", "folio", "python/rust"][one % 3]
    arrays = oracle.versions[-1].get(source, ({n: array(x) for n, x in blank().items()},))[0]
    fields = {"tokens": number, "history": [one, two]}
    return "lesson", columns | {"source": source, "fields": fields, "delta": drawn_delta(arrays, one, two)}


def drawn_delta(arrays, one, two):
    chance = np.random.default_rng([one, two])
    if two % 4 == 0:  # another shape
        count = 1 + one % 5
        bank = torch.from_numpy(chance.normal(size=(count, 2)).astype(np.float32))
        return Delta({}, {"bank": bank, "steps": torch.from_numpy(chance.integers(0, 9, count))})
    if two % 4 == 1:
        rows = {}
        for name, width in (("bank", (2,)), ("steps", ())):
            chosen = torch.from_numpy(np.sort(chance.permutation(len(arrays[name]))[: 1 + one % 3]))
            values = torch.from_numpy(chance.integers(-9, 9, (len(chosen), *width)))
            rows[name] = (chosen, values.to(blank()[name].dtype))
        return Delta(rows)
    if two % 4 == 2:  # equal to blank's numbers, and not the same
        rows = {"half": (torch.tensor([1]), torch.full((1, 1, 2), -0.0).bfloat16())}
        rows["bank"] = (torch.tensor([0]), torch.tensor([[-0.0, 0.0]]))
        return Delta(rows, {"scale": torch.tensor(float(one))})
    return Delta()  # nothing was learned


def commit(store, oracle, *drawn):
    """An operation done by both."""
    kind, columns = operation(oracle, *drawn)
    if kind == "rollback":
        columns["target"] = max(columns["target"], store.oldest)
    answer = columns["answer"]
    assert (
        store.commit(kind, answer, **{n: x for n, x in columns.items() if n != "answer"}) == answer["version"]
    )
    oracle.apply(kind, columns)


def opened(folder, **options):
    return Store.open(folder, **{"identity": "base"} | options)


def lesson(**changes):
    """The columns of a lesson that is like any other."""
    told = {"answer": {}, "at": AT, "source": "kjv", "fields": {}, "delta": Delta({}, {"x": torch.ones(2)})}
    return {name: value for name, value in (told | changes).items() if value is not ...}
