"""Overlays: what was learned, kept beside the base instead of in it.

    branch = Branch(base, attention="low_rank")    # a model of its own that reads the rest from the base
    overlay = branch.overlay()                     # what differs: rows of patches, tensors, low-rank factors
    overlay.save(folder); Overlay.load(folder)
    branch.apply(overlay)                          # exactly that again; branch.apply(None) is the base

The base is never written: a branch has copies of the patch banks and of what else it may train, and shares
all other memory. What an overlay keeps and exports is proportional to what changed.
"""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attractor.checkpoint import tensors_hash
from attractor.config import check_choice, check_size
from attractor.continual.baselines.lora import LowRank
from attractor.continual.config import AlsoName, AttentionName, check_also
from attractor.files import remove_folder, write_folder
from attractor.layer import APN, PATCH_ROLES, ROLES, check_roles
from attractor.lm import TrainableModel
from attractor.model import GPT
from attractor.version import __version__

FORMAT = 1


def fingerprint(model: TrainableModel) -> str:
    """A hash of a model's configuration and of every name, type, shape and byte of its weights."""
    return tensors_hash(model.state_dict(), model.config_now().to_json())


def bits(x: Tensor) -> Tensor:
    """The same bytes as whole numbers: 0.0 == -0.0, and they are not the same."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@dataclass(frozen=True)
class Overlay:
    """What a branch has that its base has not. Tensors are the overlay's own and are never changed."""

    base: str  # fingerprint of the base
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # bank -> patches, their rows
    whole: dict[str, Tensor] = field(default_factory=dict)  # tensors that belong to no patch
    factors: dict[str, Tensor] = field(default_factory=dict)  # of low-rank deltas: NAME.up and NAME.down
    notes: dict[str, Any] = field(default_factory=dict)  # where it comes from; anything JSON can hold

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def patches(self) -> dict[str, list[int]]:
        """Layer -> the patches that differ from the base in anything."""
        found: dict[str, set[int]] = {}
        for name, (numbers, _) in self.rows.items():
            found.setdefault(name.split(".")[1], set()).update(numbers.tolist())
        return {layer: sorted(numbers) for layer, numbers in sorted(found.items())}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"whole/{name}": value for name, value in self.whole.items()}
        tensors |= {f"factor/{name}": value for name, value in self.factors.items()}
        for name, (numbers, values) in self.rows.items():
            tensors |= {f"patch/{name}": numbers, f"rows/{name}": values}
        return tensors

    def save(self, folder: str | Path) -> None:
        """overlay.json and overlay.safetensors; the folder appears whole or not at all."""

        def fill(partial: Path) -> None:
            described = {
                "format": FORMAT, "attractor": __version__, "base": self.base, "bytes": self.nbytes,
                "patches": {layer: len(numbers) for layer, numbers in self.patches().items()},
                "notes": self.notes,
            }  # fmt: skip
            try:
                save_file(
                    {name: value.contiguous() for name, value in self._tensors().items()},
                    partial / "overlay.safetensors", metadata={"base": self.base},
                )  # fmt: skip
            except SafetensorError as error:
                raise OSError(f"cannot write {folder}: {error}") from error
            (partial / "overlay.json").write_text(json.dumps(described, indent=2))

        write_folder(Path(folder), fill)

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote; anything else is a ValueError."""
        folder = Path(folder)
        parts: dict[str, dict[str, Tensor]] = {"whole": {}, "factor": {}, "patch": {}, "rows": {}}
        try:
            described = json.loads((folder / "overlay.json").read_text())
            if described["format"] != FORMAT:
                raise ValueError(f"format {described['format']!r}: this release reads {FORMAT}")
            with safe_open(folder / "overlay.safetensors", framework="pt", device=str(device)) as file:
                if (file.metadata() or {}).get("base") != described["base"]:
                    raise ValueError("its two files belong to different overlays")
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    kind, name = key.split("/", 1)
                    parts[kind][name] = file.get_tensor(key).clone()  # not a view into the file
            if parts["patch"].keys() != parts["rows"].keys():
                raise ValueError("rows without their patches")
            if not isinstance(described["notes"], dict) or not isinstance(described["base"], str):
                raise ValueError("notes or base of the wrong type")
            if not all(value.isfinite().all() for part in parts.values() for value in part.values()):
                raise ValueError("numbers that are not finite")
            rows = {name: (numbers, parts["rows"][name]) for name, numbers in parts["patch"].items()}
            for name, (numbers, values) in rows.items():
                if numbers.dtype != torch.int64 or numbers.shape != values.shape[:1] or numbers.min() < 0:
                    raise ValueError(
                        f"{name} has {tuple(values.shape)} rows for {tuple(numbers.shape)} patches"
                    )
            return cls(described["base"], rows, parts["whole"], parts["factor"], described["notes"])
        except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{folder} holds no overlay that can be read: {error}") from error


class Archive:
    """A folder of overlays that had to make room, by name."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def names(self) -> list[str]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(place.name for place in found if (place / "overlay.json").is_file())

    def has(self, name: str) -> bool:
        return name in self.names()

    def remove(self, name: str) -> None:
        if self.has(name):
            remove_folder(self.folder / name)


class Branch:
    """A model that starts as its base and may learn without touching it.

    It owns every patch bank, the other roles named in `roles` (say "encoder"), with `attention` low-rank
    deltas beside the attention's matrices, or copies of them, and copies of what `also` names: the norms, the
    token embedding (which is the head too). The rest is the base's own memory.
    """

    def __init__(
        self,
        base: TrainableModel,
        *,
        roles: Sequence[str] = (),
        attention: AttentionName = "off",
        rank: int = 8,
        also: Sequence[AlsoName] = (),
        seed: int = 0,
        base_hash: str | None = None,
    ) -> None:
        check_roles(roles)
        check_choice("attention", attention, get_args(AttentionName))
        check_size("rank", rank)
        check_also(also)
        if not base.apn_layers():
            raise ValueError("the base has no APN layers; there are no patches to lay over")
        if not isinstance(base, GPT) and (attention != "off" or also):
            raise ValueError(
                f"overlays of a {type(base).__name__} hold patches; attention and also are GPT's"
            )
        self.base, self.attention, self.also = base, attention, tuple(also)
        self.roles = {*PATCH_ROLES, *roles}
        self.base_hash = base_hash or fingerprint(base)
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in base.parameters()}
        self.model = copy.deepcopy(base, dict(shared))  # deepcopy takes what its memo holds: no bytes move
        generator = torch.Generator().manual_seed(seed)
        self.others: dict[str, nn.Parameter] = {}
        for _, layer, name in list(self._own()):
            place, _, leaf = name.rpartition(".")
            copied = nn.Parameter(layer.get_parameter(name).detach().clone())
            setattr(layer.get_submodule(place), leaf, copied)
        if attention == "low_rank":
            for prefix, owner, name in self._attention():
                linear = cast(nn.Linear, getattr(owner, name))
                adapter = LowRank(linear, rank, 1.0, 0.0, generator).to(linear.weight.device)
                setattr(owner, name, adapter)
                self.others |= {f"{prefix}.down": adapter.down, f"{prefix}.up": adapter.up}
        self.factors = set(self.others)
        for name in list(self._copied()):
            place, _, leaf = name.rpartition(".")
            self.others[name] = nn.Parameter(self.model.get_parameter(name).detach().clone())
            setattr(self.model.get_submodule(place), leaf, self.others[name])
        self._start = {name: p.detach().clone() for name, p in self.others.items()}

    def _copied(self) -> Iterator[str]:
        """Names of parameters outside of APN layers that are the branch's own as a whole."""
        if self.attention == "whole":
            yield from (f"{prefix}.weight" for prefix, _, _ in self._attention())
        if "embedding" in self.also:
            yield "embedding.weight"
        if "norms" in self.also:
            ours = re.compile(r"blocks\.\d+\.norm_|norm\.")
            yield from (n for n, _ in self.model.named_parameters() if ours.match(n))

    def _attention(self) -> Iterator[tuple[str, nn.Module, str]]:
        for number, block in enumerate(self.model.blocks if isinstance(self.model, GPT) else ()):
            for name in ("qkv", "out"):
                yield f"blocks.{number}.attention.{name}", block.attention, name

    def _own(self) -> Iterator[tuple[str, APN, str]]:
        """Parameters of APN layers that are not the base's memory: full name, layer, name."""
        for number, layer in self.model.apn_layers().items():
            for name, _ in layer.named_parameters():
                if ROLES[name] in self.roles:
                    yield f"blocks.{number}.ffn.{name}", layer, name

    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything that is the branch's own, by its name in the model (factors by the map they are of)."""
        own = {name: layer.get_parameter(key) for name, layer, key in self._own()}
        return own | self.others

    @torch.no_grad()
    def overlay(self, **notes: Any) -> Overlay:
        """What differs from the base, byte for byte."""
        base = dict(self.base.named_parameters())
        grown = {number: layer.num_patches for number, layer in self.model.apn_layers().items()}
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        whole: dict[str, Tensor] = {}
        for number, layer in self.model.apn_layers().items():
            for name, value in layer.named_parameters():
                key = f"blocks.{number}.ffn.{name}"
                old = base[key]
                if ROLES[name] in PATCH_ROLES:
                    same = torch.zeros(grown[number], dtype=torch.bool, device=value.device)
                    same[: len(old)] = (bits(value[: len(old)]) == bits(old)).flatten(1).all(1)
                    if not same.all():
                        numbers = (~same).nonzero().flatten()
                        rows[key] = (numbers.cpu(), value[numbers].cpu())
                elif not torch.equal(bits(value), bits(old)):
                    whole[key] = value.detach().cpu().clone()
        factors: dict[str, Tensor] = {}
        for name, value in self.others.items():
            if torch.equal(bits(value), bits(self._start[name])):
                continue
            (factors if name in self.factors else whole)[name] = value.detach().cpu().clone()
        for name in list(factors):  # a factor is nothing without the other one
            for part in ("up", "down"):
                key = f"{name.rsplit('.', 1)[0]}.{part}"
                factors.setdefault(key, self.others[key].detach().cpu().clone())
        return Overlay(self.base_hash, rows, whole, factors, notes)

    @torch.no_grad()
    def apply(self, overlay: Overlay | None) -> None:
        """Become the base with this overlay: what `overlay()` saw, to the byte. Checked before any change."""
        if overlay is not None:
            self.check(overlay)
        base = dict(self.base.named_parameters())
        layers = self.model.apn_layers()
        for number, layer in layers.items():
            wanted = self.base.apn_layers()[number].num_patches
            if overlay is not None:
                wanted = max([wanted, *(int(patches.max()) + 1 for key, (patches, _) in overlay.rows.items()
                                        if key.startswith(f"blocks.{number}.ffn."))])  # fmt: skip
            if layer.num_patches != wanted:
                layer.resize(wanted, shrink=True)
        for key, layer, name in self._own():
            own, old = layer.get_parameter(name), base[key]
            own[: len(old)] = old
            if overlay is not None and key in overlay.rows:
                patches, values = overlay.rows[key]
                own[patches.to(own.device)] = values.to(own)
            if overlay is not None and key in overlay.whole:
                own.copy_(overlay.whole[key])
        for name, parameter in self.others.items():
            learned = None if overlay is None else (overlay.whole | overlay.factors).get(name)
            parameter.copy_(self._start[name] if learned is None else learned)

    def check(self, overlay: Overlay) -> None:
        """Refuse what does not fit, before anything is changed."""
        if overlay.base != self.base_hash:
            raise ValueError(
                f"the overlay was made over another base ({overlay.base[:12]}, this one is "
                f"{self.base_hash[:12]}); nothing was changed"
            )
        own = {key: layer.get_parameter(name) for key, layer, name in self._own()}
        for name, value in [*overlay.whole.items(), *overlay.factors.items()]:
            mine = own.get(name, self.others.get(name))
            if mine is None or mine.shape != value.shape:
                raise ValueError(
                    f"the overlay holds {name} {tuple(value.shape)}, which this branch does not: it needs "
                    "the same roles, attention, rank and also. Nothing was changed"
                )
        for name, (_, values) in overlay.rows.items():
            if name not in own or own[name].shape[1:] != values.shape[1:]:
                raise ValueError(f"the overlay holds rows of {name} that do not fit; nothing was changed")
        for number, layer in self.base.apn_layers().items():
            banks = [name for name, _ in layer.named_parameters() if ROLES[name] in PATCH_ROLES]
            added = {}
            for name in banks:
                patches, _ = overlay.rows.get(f"blocks.{number}.ffn.{name}", (torch.empty(0), None))
                added[name] = sorted(patch for patch in patches.tolist() if patch >= layer.num_patches)
                if len(patches.unique()) != len(patches):
                    raise ValueError(f"a patch of layer {number} is there twice; nothing was changed")
            count = max(map(len, added.values()))
            wanted = list(range(layer.num_patches, layer.num_patches + count))
            if count > 15 * layer.num_patches or any(new != wanted for new in added.values()):
                raise ValueError(f"the new patches of layer {number} do not fit; nothing was changed")
