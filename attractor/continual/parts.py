"""One lesson by itself: all of it as a Delta, taken out of `Lessons` and put in again, to the bit.

    kept = deltas_of(lessons, [3])          # its basins, its vector, its contexts and its words
    take_out(lessons, [3])                  # its patches are closed; nothing is learned again
    put_in(lessons, kept.values())          # in the same patches as before

This is what a server keeps of a lesson, and what it goes back by.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.continual.calibrate import CLOSED
from attractor.continual.delta import Delta, copied, rows_of
from attractor.continual.lessons import Contexts, Lesson, Lessons, as_tuples
from attractor.files import parse_json

FEW = 4
ABOUT, VECTOR, CONTEXTS = "about", "vector", "contexts/"
SILENT = "silent"  # of its patches, those that add nothing; lessons of earlier releases have none


def patches_of(lessons: Lessons, numbers: Iterable[int]) -> dict[int, list[int]]:
    """The patches that each of these lessons owns, in rising order."""
    found: dict[int, list[int]] = {number: [] for number in numbers}
    owners = lessons.owners
    if len(found) <= FEW:  # a list finds a number far faster than a loop does
        for number, own in found.items():
            for _ in range(owners.count(number)):
                own.append(owners.index(number, own[-1] + 1 if own else 0))
        return found
    for patch, owner in enumerate(owners):
        if owner in found:
            found[owner].append(patch)
    return found


def deltas_of(lessons: Lessons, numbers: Iterable[int]) -> dict[int, Delta]:
    """All of these lessons, each by itself."""
    return {
        number: _delta(lessons, number, torch.tensor(patches))
        for number, patches in patches_of(lessons, numbers).items()
    }


@torch.no_grad()
def _delta(lessons: Lessons, number: int, patches: Tensor) -> Delta:
    """The patches of a lesson that add something share one vector, which is kept once."""
    layer = lessons.layer
    assert layer.decoder is not None
    assert layer.radius is not None
    decoder = layer.decoder[patches.to(layer.decoder.device), 0].cpu()  # a GPU answers each question late
    silent = (decoder == 0).all(1)
    vector = decoder[int(silent.int().argmin())]  # of the first that adds something
    assert bool((decoder[~silent] == vector).all()), "a lesson has one vector"
    words = json.dumps(dataclasses.asdict(lessons.lessons[number])).encode()
    whole = {
        ABOUT: torch.frombuffer(bytearray(words), dtype=torch.uint8),
        VECTOR: copied(vector),
        SILENT: copied(silent),
        **{f"{CONTEXTS}{name}": copied(x) for name, x in vars(lessons.contexts[number]).items()},
    }
    return Delta(
        {"prototypes": rows_of(layer.prototypes, patches), "radius": rows_of(layer.radius, patches)}, whole
    )


def lesson_in(delta: Delta) -> Lesson:
    """What a lesson's delta says of it; a ValueError for what is no lesson."""
    try:
        fields = parse_json(delta.whole[ABOUT].numpy().tobytes())
        lesson = Lesson(**as_tuples(fields))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"this is no lesson: {error!r}") from error
    wrong = [
        name
        for name, kind in (("number", int), ("subject", str), ("forms", tuple), ("taken_in", tuple))
        if type(getattr(lesson, name)) is not kind
    ]
    if wrong or not all(len(form) == 2 and all(type(part) is str for part in form) for form in lesson.forms):
        raise ValueError(f"this is no lesson: its {(wrong or ['forms'])[0]} cannot be")
    return lesson


def moved(delta: Delta, patches: Sequence[int], lesson: Lesson) -> Delta:
    """The same lesson in other patches, under what `lesson` says of it."""
    numbers = torch.tensor(sorted(patches))
    words = json.dumps(dataclasses.asdict(lesson)).encode()
    about = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    return Delta(
        {name: (numbers, values) for name, (_, values) in delta.rows.items()}, {**delta.whole, ABOUT: about}
    )


def check_fit(lessons: Lessons, delta: Delta) -> None:
    """A ValueError unless this is a lesson of this width, with basins that are open."""
    layer = lessons.layer
    assert layer.decoder is not None
    width, dim = layer.prototypes.shape[1], layer.decoder.shape[-1]
    number = lesson_in(delta).number
    names = {ABOUT, VECTOR, *(f"{CONTEXTS}{field.name}" for field in dataclasses.fields(Contexts))}
    if set(delta.rows) != {"prototypes", "radius"} or set(delta.whole) - {SILENT} != names:
        raise ValueError(f"lesson {number} has {sorted({*delta.rows, *delta.whole})}, which is no lesson")
    prototypes, radius = (delta.rows[name][1] for name in ("prototypes", "radius"))
    keys, depth = (delta.whole[f"{CONTEXTS}{name}"] for name in ("keys", "depth"))
    shapes = {
        "prototypes": (prototypes, (len(radius), width), layer.prototypes.dtype),
        "radius": (radius, (len(prototypes),), torch.float32),
        "vector": (delta.whole[VECTOR], (dim,), layer.decoder.dtype),
        "contexts": (keys, (len(depth), width), torch.float16),
    }
    if SILENT in delta.whole:
        shapes[SILENT] = (delta.whole[SILENT], (len(radius),), torch.bool)
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} of lesson {number} is {tuple(tensor.shape)} of {tensor.dtype}, and must be {shape} "
                f"of {dtype}"
            )
    if not bool(((radius > 0) & (radius < CLOSED)).all()):
        raise ValueError(f"lesson {number} has basins with radii that cannot be")


@torch.no_grad()
def put_in(lessons: Lessons, deltas: Iterable[Delta]) -> None:
    """Lessons as they were taken out. A ValueError, before anything changes, if one does not fit."""
    layer, deltas = lessons.layer, list(deltas)
    for delta in deltas:
        check_fit(lessons, delta)
    patches = [patch for delta in deltas for patch in delta.rows["radius"][0].tolist()]
    there = {patch for patch in patches if patch < len(lessons.owners) and lessons.owners[patch] >= 0}
    if there or len(set(patches)) < len(patches):
        raise ValueError(f"patch {min(there, default=patches[0])} would belong to two lessons")
    needed = 1 + max(patches, default=-1)
    if needed > layer.num_patches:
        layer.resize(1 << (needed - 1).bit_length())
        lessons._close(list(range(len(lessons.owners), layer.num_patches)))
    assert layer.decoder is not None
    assert layer.radius is not None
    device = layer.prototypes.device
    for delta in deltas:
        lesson, numbers = lesson_in(delta), delta.rows["radius"][0].to(device)
        layer.prototypes[numbers] = delta.rows["prototypes"][1].to(device)
        layer.radius[numbers] = delta.rows["radius"][1].to(device)
        layer.decoder[numbers, 0] = delta.whole[VECTOR].to(device)
        if SILENT in delta.whole:
            layer.decoder[numbers[delta.whole[SILENT].to(device)]] = 0
        for patch in numbers.tolist():
            lessons.owners[patch] = lesson.number
        own: dict[str, Any] = {
            name.removeprefix(CONTEXTS): value.to(device)
            for name, value in delta.whole.items()
            if name.startswith(CONTEXTS)
        }
        lessons.lessons[lesson.number], lessons.contexts[lesson.number] = lesson, Contexts(**own)
        lessons._next = max(lessons._next, lesson.number + 1)


def take_out(lessons: Lessons, numbers: Iterable[int]) -> None:
    """Close the patches of lessons, and nothing else: what took their place is not learned again."""
    gone = set(numbers)
    lessons._close([patch for patch, owner in enumerate(lessons.owners) if owner in gone])
    for number in gone:
        del lessons.lessons[number], lessons.contexts[number]


def number_from(lessons: Lessons, number: int) -> None:
    """The next lesson has this number."""
    lessons._next = number
