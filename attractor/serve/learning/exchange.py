"""Lessons in a file: a server with the same base can take them over.

data = pack(deltas, base, calibration)
calibration, deltas = unpack(data, base)    # a ValueError for what is no such file, or of another base

The file is safetensors. Each tensor holds the bytes of one lesson's delta; the header says what the lessons
belong to. Where the calibration is the same, lessons can be put in as they are; otherwise they have to be
learned again from their words.
"""

import struct
from collections.abc import Iterable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from attractor.checkpoint import tensors_hash
from attractor.continual.delta import Delta
from attractor.continual.parts import lesson_in
from attractor.files import parse_json

FORMAT = "attractor-lessons-1"


def pack(deltas: Iterable[Delta], base: str, calibration: str) -> bytes:
    tensors = {
        str(lesson_in(delta).number): torch.frombuffer(bytearray(delta.to_bytes()), dtype=torch.uint8)
        for delta in deltas
    }
    sha256 = tensors_hash(tensors, base + calibration)
    return save(tensors, {"format": FORMAT, "base": base, "calibration": calibration, "sha256": sha256})


def unpack(data: bytes, base: str) -> tuple[str, list[Delta]]:
    """The calibration that lessons belong to, and the lessons in the order in which they were taught."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = parse_json(data[8 : 8 + length])["__metadata__"]
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, and this release reads {FORMAT!r}")
        calibration = str(header["calibration"])
        tensors = load(data)
        sha256 = tensors_hash(tensors, header["base"] + calibration)
        if header.get("sha256", sha256) != sha256:  # earlier releases did not say it
            raise ValueError("it is not what was exported: its hash differs")
        numbered = sorted((int(name), tensor) for name, tensor in tensors.items())
        deltas = [Delta.from_bytes(tensor.numpy().tobytes()) for _, tensor in numbered]
        if [lesson_in(delta).number for delta in deltas] != [number for number, _ in numbered]:
            raise ValueError("its lessons are numbered wrongly")
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise ValueError(f"this is no file of lessons: {error}") from error
    if header["base"] != base:
        raise ValueError(
            f"these lessons were taught to another base ({header['base'][:12]}, and this is {base[:12]}): "
            "teach them again from their words"
        )
    return calibration, deltas
