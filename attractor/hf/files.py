"""A retrofit on disk: adapter_config.json says what it is, adapter_model.safetensors holds its APN layers.

It fits one base and says which: by its configuration and by a hash of its weights. Reading checks everything
before it gives anything.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, check_choice
from attractor.files import save_tensors, write_folder
from attractor.layer import APN, FLOATS
from attractor.version import __version__

FORMAT = 4
READ = (1, 2, 3, 4)
"""Formats that can be read; the first had no digest of its configuration, the second no source, the
third no attention that is read."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ModeName = Literal["beside", "replace"]
BOOKKEEPING = ("_name_or_path", "transformers_version", "use_cache", "dtype", "architectures")
"""Fields of a configuration that change no logit (the dtype is that of the weights)."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a folder holds."""

    fields: dict[str, Any]  # of the base's configuration
    weights: str  # hash of the base's weights
    mode: ModeName
    layers: dict[str, APN]  # by the name of their place
    source: str | None  # the place whose input the layers read in place of their own
    attention: tuple[str, ...]  # the modules whose results they read beside it

    def check_base(self, model: Any) -> None:
        own = base_fields(model)
        if differs := _difference(self.fields, own):
            raise ValueError(f"the retrofit was made for another base: {differs}. Nothing was changed")
        if self.weights != (weights := tensors_hash(model.state_dict())):
            raise ValueError(
                f"the retrofit was made for another base, with weights {self.weights[:12]}; this one has "
                f"{weights[:12]}. It needs the same ones to the byte. Nothing was changed"
            )


def base_fields(model: Any) -> dict[str, Any]:
    """The configuration of a base, as JSON holds it, without what changes no logit."""
    return json.loads(json.dumps(_essential(model.config.to_diff_dict()), default=str))


def _essential(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _essential(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if str(name) not in BOOKKEEPING and not str(name).endswith("_token_id")
    }


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first field that both have and disagree about: releases of transformers add and drop fields."""
    for name in sorted(saved.keys() & own.keys()):
        theirs, ours = saved[name], own[name]
        if isinstance(theirs, dict) and isinstance(ours, dict):
            if inner := _difference(theirs, ours, f"{prefix}{name}."):
                return inner
        elif theirs != ours:
            return f"{prefix}{name} is {theirs!r} there and {ours!r} here"
    return None


def write(
    folder: str | Path,
    model: Any,
    layers: Mapping[str, APN],
    mode: ModeName,
    source: str | None = None,
    attention: Sequence[str] = (),
) -> None:
    """The two files; the folder appears whole or not at all. It may replace a retrofit and nothing else."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose a folder to save to")
    others = {path.name for path in folder.iterdir()} - {CONFIG, WEIGHTS} if folder.is_dir() else set()
    if others:
        raise ValueError(
            f"{folder} holds {sorted(others)[0]!r}, and saving replaces a folder as a whole: choose another"
        )
    if (folder / CONFIG).exists() and not _is_ours(folder):
        raise ValueError(f"{folder} holds an adapter that is no retrofit: choose another folder")
    tensors = {
        f"{place}.{name}": tensor.detach().cpu().contiguous()
        for place, layer in layers.items()
        for name, tensor in layer.state_dict().items()
    }
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{bad[0]} holds numbers that are not finite; nothing was saved")
    weights = tensors_hash(model.state_dict())
    described = {
        "format": FORMAT,
        "attractor": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "base": {
            "class": type(model).__name__,
            "config": base_fields(model),
            "weights": weights,
            "loaded_from": whole_path(model.name_or_path) if getattr(model, "name_or_path", "") else None,
        },
        "mode": mode,
        "source": source,
        "attention": list(attention),
        "tensors": tensors_hash(tensors),
        "dtypes": {place: _name(layer.encoder.dtype) for place, layer in layers.items()},
        "layers": {place: layer.config.to_dict() for place, layer in layers.items()},
    }
    digest = _digest(described)

    def fill(partial: Path) -> None:
        save_tensors(tensors, partial / WEIGHTS, {"format": "pt", "base": weights, "digest": digest})
        (partial / CONFIG).write_text(json.dumps({**described, "digest": digest}, indent=2))

    write_folder(folder.absolute(), fill)


def loaded_from(folder: str | Path) -> str | None:
    """The name or path of the base, where the folder of a retrofit says it; earlier releases did not."""
    try:
        found = json.loads((Path(folder) / CONFIG).read_text())["base"].get("loaded_from")
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder} holds no retrofit that can be read: {error}") from error
    return found if isinstance(found, str) else None


def whole_path(source: str | Path) -> str:
    """A path that means the same from every folder; a name stays what it is."""
    return str(Path(source).resolve()) if Path(source).exists() else str(source)


def read(folder: str | Path, dim: int, backend: str) -> Saved:
    """Read what `write` wrote, on the CPU; anything else is a ValueError."""
    try:
        folder = Path(folder)
        described = json.loads((folder / CONFIG).read_text())
        known = isinstance(described, dict) and type(described.get("format")) is int
        if not known or described["format"] not in READ:
            raise ValueError(f"not a retrofit of format {FORMAT} or older, which this release reads")
        digest = described.pop("digest", None)
        if digest != (_digest(described) if described["format"] > 1 else None):
            raise ValueError(f"{CONFIG} is not what was saved: its digest differs")
        check_choice("mode", described["mode"], get_args(ModeName))
        base, dtypes, configs = described["base"], described["dtypes"], described["layers"]
        if not configs or dtypes.keys() != configs.keys():
            raise ValueError("its layers and their types are not of the same places")
        source = described.get("source")
        if not (source is None or (isinstance(source, str) and source not in configs)):
            raise ValueError(f"its layers cannot read from {source!r}")
        attention = described.get("attention", [])
        if not isinstance(attention, list) or not all(isinstance(name, str) for name in attention):
            raise ValueError(f"its layers cannot read from {attention!r}")
        if attention and source is None:
            raise ValueError("its layers read from attention and from no FFN")
        with torch.device("meta"):
            layers = {
                place: APN.from_config(
                    dim, APNConfig.from_dict(fields), backend=backend, dtype=_dtype(dtypes[place])
                )
                for place, fields in configs.items()
            }
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("base"), metadata.get("digest")) != (base["weights"], digest):
                raise ValueError("its two files belong to different retrofits")
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (no dict)
        _fill(layers, tensors)
        if tensors_hash(tensors) != described["tensors"]:
            raise ValueError(f"{WEIGHTS} is not what was saved: its hash differs")
        return Saved(
            dict(base["config"]), str(base["weights"]), described["mode"], layers, source, tuple(attention)
        )
    except (
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise ValueError(f"{folder} holds no retrofit that can be read: {error}") from error


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _is_ours(folder: Path) -> bool:
    try:
        return {"format", "base", "mode", "layers"} <= json.loads((folder / CONFIG).read_text()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _fill(layers: Mapping[str, APN], tensors: dict[str, Tensor]) -> None:
    expected = {
        f"{place}.{name}": (tuple(tensor.shape), tensor.dtype)
        for place, layer in layers.items()
        for name, tensor in layer.state_dict().items()
    }
    found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{name}: {CONFIG} says {expected.get(name)}, {WEIGHTS} {found.get(name)}")
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
    for place, layer in layers.items():
        own = {name: tensors[f"{place}.{name}"] for name in layer.state_dict()}
        layer.load_state_dict(own, assign=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    known = {_name(dtype): dtype for dtype in FLOATS}
    check_choice("dtype", name, tuple(known))
    return known[name]
