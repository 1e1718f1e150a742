"""Where the feed-forward networks of a model are.

They are found by structure, not by a table of architectures: a list of blocks that have a child called `mlp`
(or one of its few other names), or that compute `fc2(activation_fn(fc1(x)))` by themselves, as OPT's do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
    numbers = list(layers)
    if not numbers or len(set(numbers)) != len(numbers) or any(type(number) is not int for number in numbers):
        raise ValueError(f'layers={layers!r} must be "all", a pattern, or a list of different layer numbers')
    if unknown := sorted(set(numbers) - known.keys()):
        raise ValueError(f"there are no FFNs in layers {unknown}; there are in {sorted(known)}")
    return [known[number] for number in sorted(numbers)]


def place_at(model: nn.Module, name: str) -> Place:
    """The place that begins with the module of this name. Its number is the last one in the name, or 0."""
    number = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), 0)
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
        path: places
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and (places := list(_of_list(model, path, module)))
    }
    if len(found) == 1:
        return next(iter(found.values()))
    problem = "no FFNs that are known" if not found else f"FFNs in {len(found)} lists, {', '.join(found)}"
    raise ValueError(
        f"{type(model).__name__} has {problem}: name the modules by a pattern, as in "
        f'layers="model.layers.*.mlp". {_candidates(model)}'
    )


def _of_list(model: nn.Module, path: str, blocks: Iterable[nn.Module]) -> Iterator[Place]:
    for number, block in enumerate(blocks):
        leaf = next((name for name in NAMES if isinstance(getattr(block, name, None), nn.Module)), None)
        if leaf is None and _is_split(block):
            leaf = PIECES[0]
        if leaf is not None:
            yield place_at(model, f"{path}.{number}.{leaf}")


def _is_split(block: nn.Module) -> bool:
    pieces = dict(block.named_children())
    return all(piece in pieces for piece in PIECES) and not set(NAMES) & pieces.keys() and len(pieces) > 3


def _matching(model: nn.Module, pattern: str) -> list[Place]:
    wanted = pattern.split(".")
    found: dict[int, Place] = {}
    for path, _ in model.named_modules():
        parts = path.split(".")
        if path and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            place = place_at(model, path)
            if (first := found.setdefault(place.number, place)) is not place:
                raise ValueError(
                    f"layers={pattern!r} names {first.name} and {place.name}, two places in one block: name "
                    "one of them"
                )
    if not found:
        raise ValueError(
            f"layers={pattern!r} names no module of {type(model).__name__}. {_candidates(model)}"
        )
    return [found[number] for number in sorted(found)]


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
