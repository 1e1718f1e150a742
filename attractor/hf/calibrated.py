"""The calibration of a base on background text: measured once, and kept in the cache.

    calibration, unit = calibrated(model, tokens, settings, measure)  # the second time without `measure`

A file is known by everything that the result depends on: the base, the tokens of the text, the settings, the
code and the versions of the libraries. What is read is what was measured, to the bit.
"""

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attractor import corpora
from attractor.checkpoint import tensors_hash
from attractor.continual import calibrate
from attractor.continual.calibrate import Calibration
from attractor.files import save_tensors, write_file
from attractor.hf.files import base_fields

log = logging.getLogger("attractor")

KEPT = 8
"""So many calibrations stay in the cache, the ones that were made last; one of SmolLM2 takes 21 MB."""


def calibrated(
    model: Any, tokens: Tensor, settings: Mapping[str, Any], measure: Callable[[], tuple[Calibration, float]]
) -> tuple[Calibration, float]:
    """The calibration of a base and its unit (see `Lessons`): from the cache, or measured and kept there."""
    key = _key(model, tokens, settings)
    path = corpora.cache_root() / "calibrations" / f"{key}.safetensors"
    if path.exists():
        try:
            return _read(path, key, model.device)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            log.warning("cannot use %s (%s); calibrating again", path, error)
    log.info("calibrating on background text (once for a base) ...")
    started = time.perf_counter()
    calibration, unit = measure()
    log.info("calibrated in %.1f s", time.perf_counter() - started)
    _keep(path, key, calibration, unit)
    return calibration, unit


def _key(model: Any, tokens: Tensor, settings: Mapping[str, Any]) -> str:
    about = {
        "settings": dict(settings),
        "base": base_fields(model),
        "device": model.device.type,
        "code": hashlib.sha256(inspect.getsource(calibrate).encode()).hexdigest(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }
    return tensors_hash({**model.state_dict(), "tokens": tokens}, json.dumps(about, sort_keys=True))


def _read(path: Path, key: str, device: torch.device) -> tuple[Calibration, float]:
    with safe_open(path, framework="pt") as file:
        expected = (file.metadata() or {}).get("sha256")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    if tensors_hash(tensors, key) != expected:
        raise ValueError("it is not what was written: its hash differs")
    unit = tensors.pop("unit").item()
    return Calibration(**{name: value.to(device) for name, value in tensors.items()}), unit


def _keep(path: Path, key: str, calibration: Calibration, unit: float) -> None:
    """Without a cache the calibration is still good."""
    tensors = {name: value.cpu() for name, value in vars(calibration).items()}
    tensors["unit"] = torch.tensor(unit, dtype=torch.float64)
    known_by = {"sha256": tensors_hash(tensors, key)}
    try:
        write_file(path, lambda partial: save_tensors(tensors, partial, known_by))
        made = sorted(path.parent.glob("*.safetensors"), key=lambda found: found.stat().st_mtime)
        for old in made[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("could not keep %s: %s", path, error)
