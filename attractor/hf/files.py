"""A retrofit on disk: adapter_config.json says what it is, adapter_model.safetensors holds its APN layers.

It fits one base and says which: by its configuration and by a hash of its weights. Reading checks everything
before it gives anything. What the Trainer of transformers writes is read too: model.safetensors, the state
dict of a retrofit, which describes itself.
"""

import dataclasses
import json
import logging
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, check_choice
from attractor.files import digest_of, parse_json, save_tensors, write_folder
from attractor.hf.card import MODEL_TYPE, PEFT_TYPE, licence_of, model_card
from attractor.layer import APN, FLOATS
from attractor.version import __version__

log = logging.getLogger("attractor")

FORMAT = 4
READ = (1, 2, 3, 4)
"""Formats that can be read; the first had no digest of its configuration, the second no source, the
third no attention that is read."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CARD, TYPE = "README.md", "config.json"
"""For people, and for loaders that do not know retrofits; nothing of ours reads them."""
CHECKPOINT = "model.safetensors"
"""The state dict of a retrofit, as a Trainer writes it."""
DESCRIPTION = re.compile(r"retrofits\.([^.]+)\.description")
"""What a state dict calls the description of a retrofit: JSON, as a tensor of bytes."""
OURS = {CONFIG, WEIGHTS, CARD, TYPE}
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
        if self.weights != (weights := base_hash(model)):
            raise ValueError(
                f"the retrofit was made for another base, with weights {self.weights[:12]}; this one has "
                f"{weights[:12]}. It needs the same ones to the byte. Nothing was changed"
            )


class KnownHash(NamedTuple):
    """A hash, and what shows whether the tensors are still those that it is of."""

    tensors: dict[str, tuple[weakref.ref[Tensor], int, int]]  # with how often each was written, and its place
    hash: str

    def holds(self, now: Mapping[str, Tensor]) -> bool:
        return self.tensors.keys() == now.keys() and all(
            known() is now[name] and (written, place) == (now[name]._version, now[name].data_ptr())
            for name, (known, written, place) in self.tensors.items()
        )


class BroughtBack(Mapping[str, Tensor]):
    """The tensors of a model of which `accelerate` keeps some on a disk, one in memory at a time."""

    def __init__(self, model: nn.Module, here: Mapping[str, Tensor]) -> None:
        self.model, self.here = model, here

    def __iter__(self) -> Iterator[str]:
        return iter(self.here)

    def __len__(self) -> int:
        return len(self.here)

    def __getitem__(self, name: str) -> Tensor:
        if not self.here[name].is_meta:
            return self.here[name]
        from accelerate.utils import align_module_device

        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        with align_module_device(module, torch.device("cpu")) if is_kept(module) else nullcontext():
            tensor: Tensor = getattr(module, own)
            if tensor.is_meta:
                raise ValueError(f"{name} of the base has no data: load the base before its retrofit")
            return tensor.detach().clone()


def is_kept(module: nn.Module) -> bool:
    """Whether `accelerate` keeps the tensors of a module elsewhere while they are not used."""
    from accelerate.utils import has_offloaded_params

    return has_offloaded_params(module)


_hashes: weakref.WeakKeyDictionary[nn.Module, KnownHash] = weakref.WeakKeyDictionary()


def base_hash(model: nn.Module) -> str:
    """Hash the weights of a base; again only if a tensor was replaced, moved or written to since.

    Autograd counts the writes, and it does not see what is written through `tensor.data`.
    """
    now: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if any(tensor.is_meta for tensor in now.values()):
        return tensors_hash(BroughtBack(model, now))
    if any(tensor.is_inference() for tensor in now.values()):  # nothing counts how often these are written
        return tensors_hash(now)
    known = _hashes.get(model)
    if known is None or not known.holds(now):
        tensors = {name: (weakref.ref(own), own._version, own.data_ptr()) for name, own in now.items()}
        known = _hashes[model] = KnownHash(tensors, tensors_hash(now))
    return known.hash


def base_fields(model: Any) -> dict[str, Any]:
    """The configuration of a base, as JSON holds it, without what changes no logit."""
    return _fields(model.config)


def _fields(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(_essential(config.to_diff_dict()), default=str))


def check_shape(folder: str | Path, config: Any) -> None:
    """A ValueError if a base that is not loaded yet is another one: by its configuration it may be huge."""
    saved, own = _base_of(folder).get("config"), _fields(config)
    if not isinstance(saved, dict) or saved.get("model_type") != own.get("model_type"):
        return  # models that see have the configuration of a part: the loaded base will tell
    if differs := _difference(saved, own):
        raise ValueError(f"{folder} was made for another base: {differs}. Nothing was loaded")


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
    about: Mapping[str, str] | None = None,
) -> None:
    """The four files; the folder appears whole or not at all. It may replace a retrofit and nothing else.

    `about` is what the model card is to say besides what the retrofit itself knows, by what it is about.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose a folder to save to")
    others = {path.name for path in folder.iterdir()} - OURS if folder.is_dir() else set()
    if others:
        raise ValueError(
            f"{folder} holds {sorted(others)[0]!r}, and saving replaces a folder as a whole: choose another"
        )
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(f"{folder} holds an adapter or a model that is no retrofit: choose another folder")
    if (folder / CARD).exists() and not _has_our_card(folder):
        raise ValueError(f"the {CARD} of {folder} is not as we wrote it: move it, or choose another folder")
    tensors = _tensors_of(layers)
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{bad[0]} holds numbers that are not finite; nothing was saved")
    about = dict(about or {})
    for_others = {"peft_type": PEFT_TYPE, "base_model_name_or_path": PEFT_TYPE}
    described = _describe(model, layers, mode, source, attention, about=about, **for_others)
    kind = {"model_type": MODEL_TYPE, "architectures": ["Retrofit"]}
    about = {"format": "pt", "base": described["base"]["weights"], "digest": described["digest"]}

    def fill(partial: Path) -> None:
        save_tensors(tensors, partial / WEIGHTS, about)
        (partial / CONFIG).write_text(json.dumps(described, indent=2))
        (partial / TYPE).write_text(json.dumps(kind, indent=2))
        (partial / CARD).write_text(model_card(described), encoding="utf-8")

    write_folder(folder.absolute(), fill, hashed=False)  # it has hashes of its own


def description(
    model: Any,
    layers: Mapping[str, APN],
    mode: ModeName,
    source: str | None,
    attention: Sequence[str],
    numbers: Mapping[str, int],
) -> Tensor:
    """What a state dict says of a retrofit; `numbers` are those that its tensors have in place of names."""
    described = _describe(model, layers, mode, source, attention, numbers=dict(numbers))
    return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)


def check_description(given: Tensor, own: Tensor) -> None:
    """A ValueError unless a state dict is of layers with these settings, over the same base."""
    theirs, ours = (_parse(value) for value in (given, own))
    for field in ("mode", "source", "attention", "numbers", "dtypes", "layers"):
        if theirs[field] != ours[field]:
            raise ValueError(
                f"the state dict is of a retrofit with another {field}: {theirs[field]!r} there and "
                f"{ours[field]!r} here. Build the retrofit as it was, or read it with load_retrofit"
            )
    differs = _difference(theirs["base"]["config"], ours["base"]["config"])
    if differs or theirs["base"]["weights"] != ours["base"]["weights"]:
        raise ValueError(
            f"the state dict is of a retrofit of another base: {differs or 'its weights differ'}. Load the "
            "base that it was trained over"
        )


def _tensors_of(layers: Mapping[str, APN]) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": tensor.detach().cpu().contiguous()
        for place, layer in layers.items()
        for name, tensor in layer.state_dict().items()
    }


def _describe(
    model: Any,
    layers: Mapping[str, APN],
    mode: ModeName,
    source: str | None,
    attention: Sequence[str],
    **more: Any,
) -> dict[str, Any]:
    base = whole_path(model.name_or_path) if getattr(model, "name_or_path", "") else None
    described = {
        "format": FORMAT,
        "attractor": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "base": {
            "class": type(model).__name__,
            "config": base_fields(model),
            "weights": base_hash(model),
            "dtype": _name(model.dtype),
            "loaded_from": base,
            "licence": licence_of(base),
        },
        "mode": mode,
        "source": source,
        "attention": list(attention),
        "tensors": tensors_hash(_tensors_of(layers)),
        "dtypes": {place: _name(layer.encoder.dtype) for place, layer in layers.items()},
        "layers": {place: layer.config.to_dict() for place, layer in layers.items()},
        **more,
    }
    return {**described, "digest": digest_of(described)}


def holds_retrofit(folder: str | Path) -> bool:
    """Whether a folder is meant as a retrofit: what `save_pretrained` or a Trainer wrote."""
    if (Path(folder) / CONFIG).is_file():
        return True
    try:
        with safe_open(Path(folder) / CHECKPOINT, framework="pt") as file:
            return any(map(DESCRIPTION.fullmatch, file.keys()))
    except (OSError, SafetensorError):
        return False


def loaded_from(folder: str | Path) -> str | None:
    """The name or path of the base, where the folder of a retrofit says it; earlier releases did not."""
    found = _base_of(folder).get("loaded_from")
    return found if isinstance(found, str) else None


def dtype_of_base(folder: str | Path) -> torch.dtype:
    """The dtype of the base's weights; earlier releases did not say it, and loaded bases as float32."""
    return _dtype(_base_of(folder).get("dtype", "float32"))


def _base_of(folder: str | Path) -> Mapping[str, Any]:
    folder = Path(folder)
    try:
        if (folder / CONFIG).exists():
            described = parse_json((folder / CONFIG).read_text())
        else:
            described, _ = _read_checkpoint(folder / CHECKPOINT, None)
        if not isinstance(described["base"], dict):
            raise ValueError(f"its base is {described['base']!r}")
        return described["base"]
    except (OSError, LookupError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no retrofit that can be read: {error}") from error


def whole_path(source: str | Path) -> str:
    """A path that means the same from every folder; a name stays what it is."""
    return str(Path(source).resolve()) if Path(source).exists() else str(source)


def read(folder: str | Path, dim: int, backend: str, name: str) -> Saved:
    """Read what `write` or a Trainer wrote, on the CPU; anything else is a ValueError.

    Of several retrofits that a Trainer wrote it is the one called `name`.
    """
    try:
        folder = Path(folder)
        if (folder / CONFIG).exists() or not (folder / CHECKPOINT).exists():
            described = parse_json((folder / CONFIG).read_text())
            tensors = None
        else:
            described, tensors = _read_checkpoint(folder / CHECKPOINT, name)
        known = isinstance(described, dict) and type(described.get("format")) is int
        if not known or described["format"] not in READ:
            raise ValueError(f"not a retrofit of format {FORMAT} or older, which this release reads")
        digest = described.pop("digest", None)
        if digest != (digest_of(described) if described["format"] > 1 else None):
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
        if tensors is None:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("base"), metadata.get("digest")) != (base["weights"], digest):
                    raise ValueError("its two files belong to different retrofits")
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (no dict)
        _fill(layers, tensors)
        if tensors_hash(tensors) != described["tensors"]:
            raise ValueError("its tensors are not what was saved: their hash differs")
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


def _read_checkpoint(path: Path, name: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors, by the names of their places, of a retrofit in a state dict."""
    with safe_open(path, framework="pt") as file:
        keys = list(file.keys())
        held = sorted(found[1] for found in map(DESCRIPTION.fullmatch, keys) if found)
        if not held:
            raise ValueError(
                f"{path.name} describes no retrofit: it is of another model, or of an earlier release. For "
                "the latter, build the retrofit as it was and give it these tensors by load_state_dict"
            )
        if name not in held and name is not None and len(held) > 1:
            raise ValueError(f"{path.name} holds the retrofits {held}: choose one of them as name=")
        chosen = name if name in held else held[0]
        if name is not None and len(held) > 1:
            log.warning("%s holds the retrofits %s: only %r is read", path, ", ".join(held), chosen)
        prefix = f"retrofits.{chosen}."
        described = _parse(file.get_tensor(f"{prefix}description"))
        tensors = {}
        places = {str(number): place for place, number in described["numbers"].items()}
        for key in keys:
            if key.startswith(prefix) and key != f"{prefix}description":
                number, _, rest = key.removeprefix(prefix).partition(".")
                tensors[f"{places.get(number, number)}.{rest}"] = file.get_tensor(key).clone()
            elif not key.startswith("retrofits."):
                raise ValueError(f"{path.name} holds {key}, which is of no retrofit")
    return described, tensors


def _parse(description: Tensor) -> dict[str, Any]:
    return parse_json(bytes(description.tolist()))


def _is_ours(folder: Path) -> bool:
    try:
        return {"format", "base", "mode", "layers"} <= parse_json((folder / CONFIG).read_text()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _has_our_card(folder: Path) -> bool:
    """Whether the card is what we would write: one that a person has edited must not be lost."""
    try:
        described = parse_json((folder / CONFIG).read_text())
        return (folder / CARD).read_text(encoding="utf-8") == model_card(described)
    except (OSError, LookupError, TypeError, AttributeError, ValueError):
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
            raise ValueError(f"{name}: {expected.get(name)} was saved, {found.get(name)} is there")
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
