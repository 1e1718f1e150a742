"""GGUF models as folders of safetensors in the cache: converted once, and read in a second from then on.

    keep(sha256, model, tokenizer)
    folder = find(sha256)           # None unless every file is what was written, by the versions at work now

A folder is known by the sha256 of the GGUF file that it was made from, and lists the sha256 of its files.
"""

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attractor import corpora
from attractor.files import recover_folder, sha256_of, write_folder

log = logging.getLogger("attractor")

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 1 << 30
"""Larger GGUF files are converted each time: in full precision they would fill the disk."""


def find(sha256: str) -> Path | None:
    """Where the model of the GGUF file with this hash is kept; a line says so if that is damaged."""
    folder = _folder(sha256)
    recover_folder(folder)
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not _about(sha256).items() <= manifest.items():
            raise ValueError(f"other versions made it: {manifest['versions']}")
        found = {path.name for path in folder.iterdir()} - {MANIFEST}
        if odd := found ^ manifest["files"].keys():
            raise ValueError(f"{min(odd)} is missing or not part of it")
        for name, expected in manifest["files"].items():
            if sha256_of(folder / name) != expected:
                raise ValueError(f"{name} is not what was written: its hash differs")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("cannot use %s (%s); converting the model again", folder, error)
        return None
    return folder


def keep(sha256: str, model: Any, tokenizer: Any) -> None:
    """Write a model that was read from a GGUF file, whole or not at all; without a cache it is still good."""
    config = copy.deepcopy(model.config)
    quantized = config.to_diff_dict()["quantization_config"]
    del config.quantization_config  # the numbers are whole again
    with torch.device("meta"):
        plain = type(model)(config)

    def fill(partial: Path) -> None:
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.save_pretrained(partial)
        in_order = json.dumps(plain.config.to_diff_dict(), indent=1)  # hashes of a base depend on the order
        (partial / "config.json").write_text(in_order)
        tokenizer.save_pretrained(partial)
        files = {path.name: sha256_of(path) for path in partial.iterdir()}
        manifest = {**_about(sha256), "quantization_config": quantized, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))

    folder = _folder(sha256)
    for stale in folder.parent.glob(f".partial-{folder.name}-*"):  # by a killed process
        shutil.rmtree(stale, ignore_errors=True)
    try:
        write_folder(folder, fill, hashed=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        log.warning("could not keep %s: %s", folder, error)


def restore_config(model: Any, folder: Path, file: str) -> None:
    """The configuration of a model that was found, as reading the GGUF file of this name would give it."""
    quantized = json.loads((folder / MANIFEST).read_text())["quantization_config"]
    model.config.quantization_config = {**quantized, "gguf_file": file}


def _folder(sha256: str) -> Path:
    return corpora.cache_root() / "models" / f"gguf-{sha256}"


def _about(sha256: str) -> dict[str, Any]:
    """What a conversion depends on: another release may convert differently."""
    versions = {name: metadata.version(name) for name in ("transformers", "gguf")}
    return {"format": FORMAT, "gguf": sha256, "versions": versions}


@contextmanager
def read_once() -> Iterator[None]:
    """transformers parses a GGUF file four times, and makes a table of names for each module: here, once."""
    import gguf

    found = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in found.items():
        setattr(gguf, name, lru_cache(function))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(gguf, name, function)
