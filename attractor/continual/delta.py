"""Delta: what changed between two sets of tensors, as rows of patch banks and as whole tensors.

    delta = Delta.between(before, after)      # name -> tensor, both; compared bit by bit
    delta.apply(before)                       # now `before` is `after`, to the bit
    delta.merge(later)                        # one delta that does what both do, one after the other
    Delta.from_bytes(delta.to_bytes())        # safetensors

Overlays, what a lesson did, the states that a server keeps and the copies of its readers are made of it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""Numbers of rows, in rising order, and what these rows are now."""

WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def bits(x: Tensor) -> Tensor:
    """The same bytes as whole numbers: 0.0 == -0.0, and they are not the same."""
    return x.detach().contiguous().view(WHOLE_NUMBERS[x.element_size()])


@dataclass(frozen=True, eq=False)
class Delta:
    """Tensors are the delta's own, on the CPU, and are never changed."""

    rows: Mapping[str, Rows] = field(default_factory=dict)
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def between(
        cls,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        *,
        banks: Collection[str] | None = None,
    ) -> "Delta":
        """What has to be written over `before` to have `after`; both have the same names and types.

        Tensors named in `banks` (default: all of them) are compared row by row and may have grown. Others
        are kept whole where any bit differs, and so is a tensor that has another shape otherwise.
        """
        if before.keys() != after.keys():
            raise ValueError(f"these are not in both: {sorted(before.keys() ^ after.keys())[:4]}")
        rows: dict[str, Rows] = {}
        whole: dict[str, Tensor] = {}
        for name, new in after.items():
            old = before[name]
            if old.dtype != new.dtype:
                raise ValueError(f"{name} was {old.dtype} and is {new.dtype}: a delta keeps types")
            is_bank = new.dim() > 0 and (banks is None or name in banks)
            if is_bank and new.shape[1:] == old.shape[1:] and len(new) >= len(old):
                changed = torch.ones(len(new), dtype=torch.bool, device=new.device)
                changed[: len(old)] = _by_row(bits(new[: len(old)]) != bits(old).to(new.device))
                if changed.any():
                    rows[name] = rows_of(new, changed.nonzero().flatten())
            elif new.shape != old.shape or not torch.equal(bits(new), bits(old).to(new.device)):
                whole[name] = copied(new)
        return cls(rows, whole)

    def __bool__(self) -> bool:
        return bool(self.rows or self.whole)

    @property
    def nbytes(self) -> int:
        """The bytes of all values and of the numbers of rows."""
        return sum(x.nbytes for pair in self.rows.values() for x in pair) + sum(
            x.nbytes for x in self.whole.values()
        )

    def values(self) -> Iterator[Tensor]:
        """Every tensor of new numbers, of rows and whole."""
        yield from self.whole.values()
        yield from (values for _, values in self.rows.values())

    def under(self, prefix: str) -> "Delta":
        """Return the tensors whose names begin with a prefix, without the prefix."""

        def part(named: Mapping[str, object]) -> dict[str, object]:
            return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}

        return Delta(part(self.rows), part(self.whole))  # type: ignore[arg-type]

    # --- what it does

    def check(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raise a ValueError unless this is a delta of these tensors."""
        if both := self.rows.keys() & self.whole.keys():
            raise ValueError(f"{min(both)} is there as rows and as a whole")
        for name, (numbers, values) in self.rows.items():
            _check_rows(name, numbers, values)
        named = {**self.whole, **{name: values for name, (_, values) in self.rows.items()}}
        for name, value in named.items():
            if value.dtype not in DTYPES:
                raise ValueError(f"{name} is {value.dtype}, which a delta does not keep")
            if value.is_floating_point() and not _is_finite(value):
                raise ValueError(f"{name} holds numbers that are not finite")
        if tensors is not None:
            self._check_fit(tensors)

    def _check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is looked at but names, types and shapes."""
        if unknown := (self.rows.keys() | self.whole.keys()) - tensors.keys():
            raise ValueError(f"there is no tensor {min(unknown)!r}")
        for name, value in (*self.whole.items(), *((name, pair[1]) for name, pair in self.rows.items())):
            if value.dtype != tensors[name].dtype:
                raise ValueError(f"{name} is {value.dtype} here and {tensors[name].dtype} there")
        for name, (numbers, values) in self.rows.items():
            old = tensors[name]
            if old.dim() == 0 or values.shape[1:] != old.shape[1:]:
                raise ValueError(
                    f"rows of {name} are {tuple(values.shape[1:])}, and the tensor is {tuple(old.shape)}"
                )
            added = numbers[numbers >= len(old)]
            if len(added) and not torch.equal(added, torch.arange(len(old), len(old) + len(added))):
                raise ValueError(f"row {int(added[-1])} of {name} does not follow its {len(old)} rows")

    @torch.no_grad()
    def apply(self, tensors: MutableMapping[str, Tensor]) -> None:
        """Write it over tensors, in place where their shape stays; a ValueError changes nothing."""
        self._check_fit(tensors)
        for name, value in self.whole.items():
            if tensors[name].shape == value.shape:
                tensors[name].copy_(value)
            else:
                tensors[name] = value.to(tensors[name].device, copy=True)
        for name, (numbers, values) in self.rows.items():
            count = int(numbers[-1]) + 1
            if count > len(tensors[name]):
                old = tensors[name]
                tensors[name] = old.new_empty(count, *old.shape[1:])
                tensors[name][: len(old)] = old
            target = tensors[name]
            target.index_copy_(0, numbers.to(target.device), values.to(target.device))

    def merge(self, later: "Delta") -> "Delta":
        """Return the delta that does what this one and then `later` do."""
        rows, whole = dict(self.rows), dict(self.whole)
        for name, value in later.whole.items():
            rows.pop(name, None)
            whole[name] = value
        for name, pair in later.rows.items():
            if name in whole:
                now = {name: whole[name].clone()}
                Delta({name: pair}).apply(now)
                whole[name] = now[name]
            else:
                rows[name] = _union(name, rows[name], pair) if name in rows else pair
        return Delta(rows, whole)

    def pieces(self, most: int) -> Iterator["Delta"]:
        """The same in parts of at most so many bytes, or of one row or one whole tensor each."""
        part = Delta()
        for piece in self._cut(most):
            if part and part.nbytes + piece.nbytes > most:
                yield part
                part = Delta()
            part = part.merge(piece)
        if part:
            yield part

    def _cut(self, most: int) -> Iterator["Delta"]:
        for name, value in self.whole.items():
            yield Delta(whole={name: value})
        for name, (numbers, values) in self.rows.items():
            count = max(1, most // (values[0].nbytes + numbers.element_size()))
            for some, those in zip(numbers.split(count), values.split(count), strict=True):
                yield Delta({name: (some, those)})

    # --- bytes

    def to_bytes(self) -> bytes:
        """As safetensors: whole/NAME, and for each set of rows GROUP rows/GROUP and GROUP/NAME.

        Equal deltas give equal bytes.
        """
        tensors = {f"whole/{name}": value.contiguous() for name, value in self.whole.items()}
        groups: dict[bytes, int] = {}
        for name, (numbers, values) in sorted(self.rows.items()):
            group = groups.setdefault(numbers.numpy().tobytes(), len(groups))
            # a copy: safetensors refuses tensors that share memory, as rows of a delta that was read do
            tensors.setdefault(f"rows/{group}", numbers.clone())
            tensors[f"{group}/{name}"] = values.contiguous()
        return save(tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Delta":
        """Read what `to_bytes` wrote; anything else is a ValueError."""
        try:
            tensors = load(data)
            groups = {
                name.removeprefix("rows/"): x for name, x in tensors.items() if name.startswith("rows/")
            }
            rows: dict[str, Rows] = {}
            whole: dict[str, Tensor] = {}
            for full, value in tensors.items():
                kind, slash, name = full.partition("/")
                if kind == "whole" and slash:
                    whole[name] = value
                elif kind != "rows":
                    if kind not in groups or name in rows:
                        raise ValueError(f"{full!r} belongs to no rows, or is there twice")
                    rows[name] = (groups[kind], value)
            delta = cls(rows, whole)
            delta.check()
        except (SafetensorError, LookupError, TypeError, RuntimeError, OverflowError, ValueError) as error:
            raise ValueError(f"these {len(data):,} bytes are no delta: {error}") from error
        return delta


def merged(deltas: Iterable[Delta]) -> Delta:
    """Return the delta that does what all of these do, one after the other."""
    pile: list[Delta] = []
    for delta in deltas:
        pile_up(pile, delta)
    result = Delta()
    for delta in pile:
        result = result.merge(delta)
    return result


def pile_up(pile: list[Delta], later: Delta) -> None:
    """Put a delta upon others. Those of like size become one, so that a large one is seldom copied."""
    pile.append(later)
    while len(pile) > 1 and pile[-2].nbytes <= 2 * pile[-1].nbytes:
        top = pile.pop()
        pile[-1] = pile[-1].merge(top)


def rows_of(tensor: Tensor, numbers: Tensor) -> Rows:
    """These rows of a tensor as they are now; numbers are in rising order."""
    return numbers.cpu(), tensor.detach()[numbers.to(tensor.device)].cpu()


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _by_row(differs: Tensor) -> Tensor:
    return differs.flatten(1).any(1) if differs.dim() > 1 else differs


def _is_finite(value: Tensor) -> bool:
    """One number that is not finite makes a sum that is not; only then every number has to be looked at."""
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def _check_rows(name: str, numbers: Tensor, values: Tensor) -> None:
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise ValueError(
            f"rows of {name} are numbered by {numbers.dtype} {tuple(numbers.shape)}, not int64 (n)"
        )
    if values.dim() == 0 or len(values) != len(numbers) or not len(numbers):
        raise ValueError(
            f"{name} has {tuple(values.shape)} for {len(numbers)} rows; there must be one or more"
        )
    plain = numbers.numpy()  # quicker than torch for so few
    if plain[0] < 0 or not (plain[1:] > plain[:-1]).all():
        raise ValueError(f"rows of {name} must be numbered from 0, each once and in rising order")


def _union(name: str, earlier: Rows, later: Rows) -> Rows:
    if torch.equal(earlier[0], later[0]):
        return later
    if earlier[1].shape[1:] != later[1].shape[1:] or earlier[1].dtype != later[1].dtype:
        raise ValueError(f"rows of {name} do not fit each other: {earlier[1].shape} and {later[1].shape}")
    numbers, order = torch.cat([earlier[0], later[0]]).sort(stable=True)
    is_last = torch.ones(len(numbers), dtype=torch.bool)
    is_last[:-1] = numbers[1:] != numbers[:-1]
    return numbers[is_last], torch.cat([earlier[1], later[1]])[order[is_last]]
