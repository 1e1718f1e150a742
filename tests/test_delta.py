"""Delta: what changed and nothing else, to the bit; one after the other or merged, in memory or as bytes."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attractor.continual.delta import DTYPES, Delta, bits, merged

KINDS = sorted(DTYPES, key=str)
SHAPES = {"bank": (3, 2), "deep": (2, 1, 3), "flat": (4,), "scale": (), "wide": (2, 0), "none": (0, 2)}


def numbers(shape, dtype, seed):
    """Any that are finite, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-2, 3, shape, generator=generator)
    if dtype.is_floating_point:
        return torch.where(drawn == 0, -0.0 if seed % 2 else 0.0, drawn.double() * 0.37).to(dtype)
    return drawn.to(dtype)


@st.composite
def start(draw):
    return {name: numbers(shape, draw(st.sampled_from(KINDS)), 0) for name, shape in SHAPES.items()}


def moved(before, changes):
    """The same tensors after some of these happened: rows, growth, another shape."""
    after = {name: value.clone() for name, value in before.items()}
    for name, what, seed in changes:
        value, dtype = after[name], after[name].dtype
        if what == "rows" and value.dim() and len(value):
            value[seed % len(value)] = numbers(value.shape[1:], dtype, seed)
        elif what == "grow" and value.dim():
            after[name] = torch.cat([value, numbers((1 + seed % 2, *value.shape[1:]), dtype, seed)])
        elif what == "shape":
            after[name] = numbers((1 + seed % 3, 2), dtype, seed)
        elif what == "all":
            after[name] = numbers(value.shape, dtype, seed)
    return after


WHAT = ["rows", "grow", "shape", "all"]
CHANGES = st.lists(
    st.tuples(st.sampled_from(list(SHAPES)), st.sampled_from(WHAT), st.integers(1, 50)), max_size=8
)
BANKS = st.none() | st.sets(st.sampled_from(list(SHAPES)))


def same(a, b):
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and x.shape == b[name].shape and torch.equal(bits(x), bits(b[name]))
        for name, x in a.items()
    )


def applied(delta, tensors):
    now = {name: value.clone() for name, value in tensors.items()}
    delta.apply(now)
    return now


@given(start(), CHANGES, BANKS)
def test_between_and_apply_are_inverse_to_the_bit(before, changes, banks):
    after = moved(before, changes)
    kept = {name: value.clone() for name, value in (before | {f"{n}'": x for n, x in after.items()}).items()}
    delta = Delta.between(before, after, banks=banks)
    delta.check(before)
    assert same(applied(delta, before), after)
    assert bool(delta) == (not same(before, after))
    for name, (rows, values) in delta.rows.items():  # no row that was so before
        for row, value in zip(rows.tolist(), values, strict=True):
            assert row >= len(before[name]) or not torch.equal(bits(value), bits(before[name][row]))
    assert delta.nbytes == sum(x.nbytes for x in delta.values()) + sum(
        rows.nbytes for rows, _ in delta.rows.values()
    )
    assert same(kept, before | {f"{n}'": x for n, x in after.items()})
    for value in after.values():  # the delta is of its own memory
        value.zero_()
    assert same(applied(delta, before), {name: kept[f"{name}'"] for name in before})


@given(start(), st.lists(CHANGES, min_size=3, max_size=3), BANKS)
def test_merging_is_associative_and_is_one_after_the_other(before, changes, banks):
    steps, states = [], [before]
    for change in changes:
        states.append(moved(states[-1], change))
        steps.append(Delta.between(states[-2], states[-1], banks=banks))
    one, two, three = steps
    left, right = one.merge(two).merge(three), one.merge(two.merge(three))
    assert left.to_bytes() == right.to_bytes() == merged(steps).to_bytes()
    assert same(applied(left, before), states[-1])
    assert merged([Delta(), one]).to_bytes() == one.to_bytes() == one.merge(Delta()).to_bytes()


@given(start(), CHANGES, BANKS, st.integers(1, 200))
def test_bytes_and_pieces_round_trip(before, changes, banks, most):
    delta = Delta.between(before, moved(before, changes), banks=banks)
    data = delta.to_bytes()
    again = Delta.from_bytes(data)
    assert same(again.whole, delta.whole)
    for part in (0, 1):
        assert same(*({n: pair[part] for n, pair in each.rows.items()} for each in (again, delta)))
    assert again.to_bytes() == data
    pieces = list(again.pieces(most))
    assert merged(Delta.from_bytes(piece.to_bytes()) for piece in pieces).to_bytes() == data
    for piece in pieces:
        assert (
            piece.nbytes <= most or len(piece.whole) + sum(len(rows) for rows, _ in piece.rows.values()) == 1
        )


def test_many_are_merged_as_one_after_the_other():
    """Of all sizes, so that some wait for others."""
    generator = torch.Generator().manual_seed(0)
    state = {"bank": torch.zeros(50, 4)}
    steps, now = [], state
    for number in range(40):
        rows = torch.randperm(50, generator=generator)[: 1 + number * 7 % 30].sort().values
        after = {"bank": now["bank"].index_fill(0, rows, float(number))}
        steps.append(Delta.between(now, after))
        now = after
    assert same(applied(merged(steps), state), now)


# --- what is refused


@settings(max_examples=200)
@given(start(), CHANGES, st.data())
def test_damaged_bytes_are_a_clear_error(before, changes, data):
    delta = Delta.between(before, moved(before, changes))
    whole = delta.to_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        damaged = bytes(damaged)
    assume(damaged != whole)
    try:
        found = Delta.from_bytes(damaged)
    except ValueError as error:
        assert f"these {len(damaged):,} bytes are no delta" in str(error)  # noqa: PT017
    else:  # other numbers or names, which only a checksum can tell; it is a delta still
        assert len(damaged) == len(whole)
        found.check()


ONE, TWO = torch.tensor([1]), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("rows", "whole", "message"),
    [
        ({"bank": (TWO, torch.ones(1, 2))}, {}, "for 2 rows"),
        ({"bank": (TWO[:0], torch.ones(0, 2))}, {}, "one or more"),
        ({"bank": (TWO.int(), torch.ones(2, 2))}, {}, "not int64"),
        ({"bank": (TWO[None], torch.ones(2, 2))}, {}, "not int64"),
        ({"bank": (TWO - 1, torch.ones(2, 2))}, {}, "numbered from 0"),
        ({"bank": (TWO.flip(0), torch.ones(2, 2))}, {}, "rising order"),
        ({"bank": (TWO * 0, torch.ones(2, 2))}, {}, "each once"),
        ({"bank": (TWO, torch.ones(2, 2) / 0)}, {}, "not finite"),
        ({}, {"bank": torch.tensor(float("nan"))}, "not finite"),
        ({}, {"bank": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"bank": (TWO, torch.ones(2, 2))}, {"bank": torch.ones(1)}, "as rows and as a whole"),
    ],
)
def test_what_is_no_delta(rows, whole, message):
    with pytest.raises(ValueError, match=message):
        Delta(rows, whole).check()


@pytest.mark.parametrize(
    ("rows", "whole", "message"),
    [
        ({"other": (ONE, torch.ones(1, 2))}, {}, "no tensor 'other'"),
        ({"bank": (ONE, torch.ones(1, 3))}, {}, r"are \(3,\), and the tensor is \(3, 2\)"),
        ({"bank": (ONE, torch.ones(1, 2).double())}, {}, "float64 here and torch.float32 there"),
        ({"bank": (ONE + 3, torch.ones(1, 2))}, {}, "row 4 of bank does not follow its 3 rows"),
        ({"scale": (ONE, torch.ones(1))}, {}, "the tensor is"),
        ({"flat": (ONE, torch.ones(1))}, {"bank": torch.ones(2, dtype=torch.int64)}, "int64 here"),
    ],
)
def test_what_does_not_fit_changes_nothing(rows, whole, message):
    tensors = {"bank": torch.zeros(3, 2), "scale": torch.tensor(0.0), "flat": torch.zeros(4)}
    delta = Delta({"flat": (ONE, torch.ones(1)), **rows}, whole)
    with pytest.raises(ValueError, match=message):
        delta.apply(tensors)
    assert not any(value.any() for value in tensors.values())


def test_two_sets_of_tensors_must_be_comparable():
    with pytest.raises(ValueError, match="not in both: \\['b'\\]"):
        Delta.between({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"a was torch.float32 and is torch.float64"):
        Delta.between({"a": torch.ones(1)}, {"a": torch.ones(1).double()})


def test_parts_by_name():
    delta = Delta(
        {"weights/a": (ONE, torch.ones(1, 2))}, {"weights/b": torch.ones(2), "state/c": torch.ones(3)}
    )
    part = delta.under("weights/")
    assert (list(part.rows), list(part.whole)) == (["a"], ["b"])


def test_rows_that_are_the_same_are_kept_once():
    values = {f"bank.{number}": (TWO.clone(), torch.ones(2, 8)) for number in range(20)}
    assert len(Delta(values).to_bytes()) < 20 * 2 * 8 * 4 + 20 * 90
