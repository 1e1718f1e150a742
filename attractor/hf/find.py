"""Where the feed-forward networks of a model are.

They are found by structure, not by a table of architectures: a list of blocks that have a child called `mlp`
(or one of its few other names), or that compute `fc2(activation_fn(fc1(x)))` by themselves, as OPT's do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

Layers = str | Sequence[int]

NAMES = ("mlp", "ffn", "feed_forward")
PIECES = ("fc1", "activation_fn", "fc2")
SHOWN = 20


@dataclass(frozen=True, eq=False)
class Place:
    """One FFN of a model."""

    name: str  # path of the module that reads the FFN's input
    number: int  # of its block
    modules: tuple[nn.Module, ...]  # one FFN, or the pieces that are one when called after each other


def find_places(model: nn.Module, layers: Layers) -> list[Place]:
    """The FFNs of "all" blocks, of the blocks in a list of numbers, or those that a pattern names.

    In a pattern such as "model.layers.[0-3].mlp" a wildcard stands for part of one name between dots.
    """
    if isinstance(layers, str) and layers != "all":
        return _matching(model, layers)
    places = _in_blocks(model)
    if isinstance(layers, str):
        return places
    known = {place.number: place for place in places}
    numbers = list(layers) if isinstance(layers, Iterable) else []
    if not numbers or len(set(numbers)) != len(numbers) or any(type(number) is not int for number in numbers):
        raise ValueError(f'layers={layers!r} must be "all", a pattern, or a list of different layer numbers')
    if unknown := sorted(set(numbers) - known.keys()):
        raise ValueError(f"there are no FFNs in layers {unknown}; there are in {sorted(known)}")
    return [known[number] for number in sorted(numbers)]


def places_at(model: nn.Module, names: Sequence[str]) -> list[Place]:
    """The places that begin with the modules of these names, numbered by the block they are in.

    That is the last number in a name by which all of them differ.
    """
    paths = [name.split(".") for name in names]
    numbers = [0] * len(names)
    for column in reversed([*zip(*paths, strict=False)]):
        if all(part.isdigit() for part in column):
            numbers = [int(part) for part in column]
            if len(set(numbers)) == len(names):
                break
    places = [_place(model, name, number) for name, number in zip(names, numbers, strict=True)]
    first: dict[Any, Place] = {}
    for place in places:
        if (other := first.setdefault(place.number, place)) is not place:
            raise ValueError(f"{other.name} and {place.name} are two places in one block: name one of them")
        for module in place.modules:
            if (other := first.setdefault(module, place)) is not place:
                raise ValueError(f"{other.name} and {place.name} share a module: name one of them")
    return sorted(places, key=lambda place: place.number)


def attention_of(model: nn.Module, place: Place) -> str:
    """The path of the attention of the block that a place is in."""
    block = place.name.rpartition(".")[0]
    for name, child in model.get_submodule(block).named_children():
        if "attention" in type(child).__name__.lower():
            return f"{block}.{name}"
    raise ValueError(f"{block} has no attention that is known: layers can read from FFNs alone there")


def _place(model: nn.Module, name: str, number: int) -> Place:
    owner, _, leaf = name.rpartition(".")
    block = model.get_submodule(owner)
    if leaf != PIECES[0] or not _is_split(block):
        return Place(name, number, (model.get_submodule(name),))
    if getattr(block, "activation_dropout", 0):
        raise ValueError(
            f"{owner} drops activations between {PIECES[0]} and {PIECES[2]}, and an APN layer stands beside "
            "both: set its activation_dropout to 0"
        )
    return Place(name, number, tuple(block.get_submodule(piece) for piece in PIECES))


def _in_blocks(model: nn.Module) -> list[Place]:
    found = {
        path: names
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and (names := list(_of_list(path, module)))
    }
    if len(found) > 1:  # one that sees has FFNs elsewhere too
        decoder = getattr(model, "get_decoder", lambda: model)() or model
        inside = set(decoder.modules())
        text = {path: names for path, names in found.items() if model.get_submodule(path) in inside}
        found = text if len(text) == 1 else found
    if len(found) == 1:
        return places_at(model, next(iter(found.values())))
    problem = "no FFNs that are known" if not found else f"FFNs in {len(found)} lists, {', '.join(found)}"
    raise ValueError(
        f"{type(model).__name__} has {problem}: name the modules by a pattern, as in "
        f'layers="model.layers.*.mlp". {_candidates(model)}'
    )


def _of_list(path: str, blocks: Iterable[nn.Module]) -> Iterator[str]:
    for number, block in enumerate(blocks):
        leaf = next((name for name in NAMES if isinstance(getattr(block, name, None), nn.Module)), None)
        if leaf is None and _is_split(block):
            leaf = PIECES[0]
        if leaf is not None:
            yield f"{path}.{number}.{leaf}"


def _is_split(block: nn.Module) -> bool:
    pieces = dict(block.named_children())
    return all(piece in pieces for piece in PIECES) and not set(NAMES) & pieces.keys() and len(pieces) > 3


def _matching(model: nn.Module, pattern: str) -> list[Place]:
    wanted = pattern.split(".")
    found = []
    for path, _ in model.named_modules(remove_duplicate=False):
        parts = path.split(".")
        if path and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            found.append(path)
    if not found:
        raise ValueError(
            f"layers={pattern!r} names no module of {type(model).__name__}. {_candidates(model)}"
        )
    return places_at(model, found)


def _candidates(model: nn.Module) -> str:
    """Patterns of the modules with matrices that the items of lists have, the most frequent first."""
    counts: Counter[str] = Counter()
    for path, module in model.named_modules():
        parts = path.split(".")
        in_list = len(parts) > 1 and parts[-2].isdigit()
        if in_list and any(parameter.dim() > 1 for parameter in module.parameters()):
            counts[".".join("*" if part.isdigit() else part for part in parts)] += 1
    found = [f"{pattern!r} ({count})" for pattern, count in counts.most_common(SHOWN)]
    return f"Candidates: {', '.join(found) or 'none'}"
