"""The study of capacity: its arithmetic on cases worked out by hand, its people, and that it runs."""

import math

import pytest
import torch

from studies import __main__ as studies
from studies import capacity
from studies.capacity import PLANS, Words, ask, bits_of, forms_of, kept, model_of, name_of, orders, sizes
from studies.report import study_tables
from studies.report.readings import read

POOLS = {"side": 4, "shade": 8}  # 2 + 3 bits
WORDS = Words(POOLS, (3, 2, 2))


def saying(right: dict[str, float]):
    """A model that gives the right value of each attribute this probability, and the rest to the others."""

    def logits(tokens):
        found = torch.full((*tokens.shape, len(WORDS.words)), -torch.inf)
        for row, text in enumerate(tokens.tolist()):
            for place in range(WORDS.first_value - 1, len(text) - 1, 2):
                relation = WORDS.words[text[place]]
                first, share = WORDS.number[f"{relation}.0"], right[relation]
                values = torch.full((POOLS[relation],), (1 - share) / (POOLS[relation] - 1))
                values[text[place + 1] - first] = share
                found[row, place, first : first + POOLS[relation]] = values.log()
        return found

    return logits


@pytest.mark.parametrize(
    ("right", "bits"),
    [
        ({"side": 1, "shade": 1}, {"side": 2, "shade": 3}),  # all of it
        ({"side": 1 / 4, "shade": 1 / 8}, {"side": 0, "shade": 0}),  # nothing but the pools
        ({"side": 1 / 2, "shade": 1}, {"side": 1, "shade": 3}),  # one bit of doubt
        ({"side": 1 / 16, "shade": 1 / 8}, {"side": -2, "shade": 0}),  # wrong, and sure of it
    ],
)
def test_bits_by_hand(right, bits):
    people = WORDS.people(10, 0)
    found = ask(saying(right), WORDS, people, rows=4)
    assert found.of == pytest.approx(bits, abs=1e-5)
    assert found.bits == pytest.approx(sum(bits.values()), abs=1e-5)
    assert found.right == (1.0 if min(right.values()) >= 0.5 else found.right)


def test_a_biography_has_the_bits_of_its_pools():
    assert bits_of(POOLS) == 5
    assert bits_of(capacity.POOLS) == pytest.approx(math.log2(12 * 28 * 200 * 300 * 100 * 256))
    assert kept([0, 0], POOLS) == 5
    assert kept([math.log(4), math.log(8)], POOLS) == pytest.approx(0)
    assert kept([math.log(4), 0], POOLS) == pytest.approx(3)


def test_people_have_different_names_and_values_of_every_pool():
    people = WORDS.people(12, 1)  # all that there are
    assert len({tuple(person[:3]) for person in people.tolist()}) == 12
    with pytest.raises(ValueError, match="13 people: there are no more than 12 names"):
        WORDS.people(13, 1)
    many = Words(capacity.POOLS).people(20_000, 0)
    for column, (relation, size) in enumerate(capacity.POOLS.items(), 3):
        value = many[:, column] - Words(capacity.POOLS).number[f"{relation}.0"]
        counts = torch.bincount(value, minlength=size)
        assert len(counts) == size
        assert (counts - 20_000 / size).abs().max() < 6 * (20_000 / size) ** 0.5
    more = Words(capacity.POOLS).people(20_100, 0)
    known, names = {tuple(person[:3]) for person in many.tolist()}, more[20_000:, :3].tolist()
    assert not any(tuple(name) in known for name in names)  # lessons are about strangers


def test_a_biography_is_read_in_any_order_and_means_the_same():
    people = WORDS.people(5, 0)
    order = orders(5, 2, torch.Generator().manual_seed(3))
    for person, text in zip(people.tolist(), WORDS.read(people, order).tolist(), strict=True):
        said = [WORDS.words[token] for token in text]
        assert said[:4] == [capacity.START, *name_of(WORDS, person).split()]
        told = dict(zip(said[4::2], said[5::2], strict=True))
        assert told == {
            relation: WORDS.words[value] for relation, value in zip(POOLS, person[3:], strict=True)
        }
        forms = [WORDS.encode(prompt + answer) for prompt, answer in forms_of(WORDS, person)]
        assert sorted(forms) == sorted([*text[:4], *text[place : place + 2]] for place in (4, 6))


def test_everybody_is_read_as_often():
    draw = torch.Generator().manual_seed(0)
    parts = capacity._parts(torch.arange(10)[:, None], 4, draw)
    seen = torch.cat([next(parts) for _ in range(15)])[:, 0]  # six times ten
    assert torch.bincount(seen).tolist() == [6] * 10


@pytest.mark.parametrize("size", PLANS)
def test_models_of_both_kinds_have_as_many_parameters(size):
    plan = PLANS[size]
    dense, apn = (sizes(model_of(kind, plan, Words(plan.pools))) for kind in capacity.KINDS)
    assert dense["of FFNs"] == plan.layers * 8 * plan.dim**2
    assert apn["parameters"] == pytest.approx(dense["parameters"], rel=0.01)
    most = max(plan.exposures)
    if size != "smoke":  # at two bits per parameter, and that is all that models were seen to hold
        assert most < 1000 or plan.people * bits_of(plan.pools) > 2 * dense["parameters"]


def test_the_study_runs_and_is_shown(tmp_path, capsys):
    result = tmp_path / "capacity.json"
    assert studies.main(["capacity", "--out", str(tmp_path), "--result", str(result), "--device", "cpu"]) == 0
    rows = read(result).values["rows"]
    assert [*rows] == ["apn, 20", "dense, 20", "apn, 40", "dense, 40", "basins, 20", "basins, 40"]
    for row in rows.values():
        assert row["bits kept of a person"] == pytest.approx(sum(row["bits by attribute"].values()))
        assert row["bits kept of a person"] < row["bits of a person"]
    for kind in capacity.KINDS:
        short, long = (rows[f"{kind}, {count}"]["bits kept of a person"] for count in (20, 40))
        assert long > short
    for row in (rows["basins, 20"], rows["basins, 40"]):
        assert row["bits kept of a person"] > row["bits kept before"]
        numbers = row["patches of a lesson"] * (2 * PLANS["smoke"].dim + 1)
        assert row["bits per parameter"] == pytest.approx(row["bits kept of a person"] / numbers)
    (table,) = study_tables.TABLES["capacity"](read(result))
    assert len(table.rows) == 6
    assert "Biographies of 38.91 bits" in capsys.readouterr().out
