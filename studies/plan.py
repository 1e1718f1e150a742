"""What the benchmark is made of: texts, models, and how much of each a size takes."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from attractor import presets
from attractor.checkpoint import find_model
from attractor.config import APNConfig, DataConfig, GPTConfig, MoEConfig, RunConfig, TrainConfig
from attractor.data import open_text
from attractor.loop import annealed, evenly
from attractor.model import GPT
from studies.grid import Settings

Size = Literal["smoke", "small", "full"]
HOME = "shakespeare"
PAPER = "paper-shift"
FOLIO = "first-folio"
TARGETS = ("kjv", FOLIO, PAPER, "python")
"""Domains to adapt to. Of the paper's own there are as few bytes to learn from as in the paper."""
PAPER_BYTES = 8_722
MIXTURE = ("shakespeare", "kjv")
TUNED_ON = "kjv"
KINDS = ("dense", "apn", "moe", "switch")
EXPERTS = MoEConfig(noise=False)
"""With noise they predict worse: results/moe-noise-small.json."""


@dataclass(frozen=True)
class Plan:
    """What a size means."""

    model: GPTConfig
    apn: APNConfig
    moe: MoEConfig
    train: TrainConfig
    steps: int
    batch_size: int
    rates: tuple[float, ...]
    test_bytes: int
    val_bytes: int
    train_bytes: int | None
    stream_tokens: int
    seeds: int = 1
    mixture_steps: int = 1750
    """Of a model that is trained to be compared and not to be adapted."""
    evaluations: int = 6
    """Of a run of adaptation, evenly spaced; the best of them by B's validation text is what counts."""
    passes: int = 10
    """Over a text, at most: a small one would be known by heart before the first evaluation."""
    warmup: float = 0.08
    """Share of the steps."""
    bpe_vocabulary: int = 4096
    memory: int = 1024
    """Sequences of the old text that methods with a memory may keep."""

    def config(self, kind: str, seed: int) -> RunConfig:
        train = dataclasses.replace(self.train, seed=seed)
        run = RunConfig(model=self.model, train=train, data=DataConfig(tokenizer="byte"))
        if kind == "apn":
            return presets.with_apn(run, self.apn)
        if kind == "moe":
            return presets.with_mixture(run, "moe", self.moe)
        if kind == "switch":  # experts of the dense FFN's width: half as many for the same parameters
            return presets.with_mixture(run, "switch", MoEConfig(num_experts=self.moe.num_experts // 2))
        return run

    def steps_on(self, length: int) -> int:
        """How many steps a text of this length is learned from."""
        most = self.passes * length // (self.batch_size * self.model.context)
        return min(self.steps, max(self.evaluations, most))

    def rate_at(self, step: int, rate: float, steps: int) -> float:
        return rate * annealed(step, steps, round(self.warmup * steps))

    def evaluated(self, steps: int) -> list[int]:
        return sorted(evenly(steps, self.evaluations))


PLANS: dict[Size, Plan] = {
    "smoke": Plan(
        model=GPTConfig(vocab_size=256, context=32, num_layers=2, num_heads=2, dim=32, ffn_start="unit"),
        apn=APNConfig(num_patches=16, top_k=2, rank=16),
        moe=dataclasses.replace(EXPERTS, num_experts=4),
        train=TrainConfig(
            max_steps=60,
            batch_size=16,
            learning_rate=1e-2,
            warmup_steps=10,
            eval_interval=30,
            checkpoint_interval=60,
        ),
        steps=6,
        batch_size=4,
        rates=(1e-3, 1e-2),
        test_bytes=4096,
        val_bytes=2048,
        train_bytes=65_536,
        stream_tokens=2048,
        evaluations=2,
        memory=128,
        bpe_vocabulary=300,
        mixture_steps=60,
    ),
    "small": Plan(
        model=GPTConfig(
            vocab_size=256, context=128, num_layers=4, num_heads=4, dim=128, dropout=0.1, ffn_start="unit"
        ),
        apn=APNConfig(num_patches=32, top_k=4, rank=64, patch_dropout=0.15),
        moe=EXPERTS,
        train=TrainConfig(max_steps=1500, batch_size=32, patience=3),
        steps=300,
        batch_size=16,
        rates=(1e-3, 3e-3, 1e-2),
        test_bytes=102_400,
        val_bytes=25_600,
        train_bytes=1_000_000,
        stream_tokens=131_072,
    ),
    "full": Plan(
        model=GPTConfig(vocab_size=256, dropout=0.2, ffn_start="unit"),
        apn=APNConfig(num_patches=64, top_k=16, rank=128, patch_dropout=0.3),
        moe=EXPERTS,
        train=TrainConfig(max_steps=2500, patience=3, checkpoint_interval=2500),
        steps=600,
        batch_size=32,
        rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        seeds=3,
        test_bytes=102_400,
        val_bytes=51_200,
        train_bytes=None,
        stream_tokens=393_216,
    ),
}
"""Everything runs, and means nothing; for a patient CPU; for a GPU."""


def named_texts(option: str, given: Sequence[str]) -> dict[str, str]:
    """Texts given as NAME=FILE, each name once; the option is named where that is wrong."""
    named: dict[str, str] = {}
    for text in given:
        label, sign, source = text.partition("=")
        if not sign or not label.replace("-", "").isalnum():
            raise ValueError(f"{option} {text!r} must be NAME=FILE; the name has letters, digits and -")
        if label in named:
            raise ValueError(f"{option} names {label!r} twice: {named[label]} and {source}")
        named[label] = source
    return named


class Text(NamedTuple):
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def read_domains(plan: Plan, sources: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Every domain as bytes in folder/texts, for the cells to read; returns the hash of what they read."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, source in sources.items():
        held_out = plan.test_bytes + plan.val_bytes
        few = name == PAPER and source == PAPER
        # of the grammar's text a little more, since it ends with a sentence
        text = open_text(source, size=PAPER_BYTES + held_out + 4096) if few else open_text(source)
        data = "".join(text.chunks()).encode()
        if not few and len(data) < 2 * held_out:
            raise ValueError(f"{source!r} has {len(data):,} bytes; a domain needs {2 * held_out:,} or more")
        train = data[:-held_out][: PAPER_BYTES if few else plan.train_bytes]
        used = train + data[-held_out:]
        place = folder / "texts" / f"{name}.bin"
        if not place.is_file() or place.read_bytes() != used:
            place.write_bytes(used)
        hashes[name] = hashlib.sha256(used).hexdigest()
    return hashes


def domain(plan: Plan, folder: Path, name: str) -> Text:
    data = np.frombuffer((folder / "texts" / f"{name}.bin").read_bytes(), dtype=np.uint8).astype(np.int64)
    rest, test = np.split(data, [len(data) - plan.test_bytes])
    train, validation = np.split(rest, [len(rest) - plan.val_bytes])
    return Text(train, validation, test)


def load_base(folder: Path, name: str, device: torch.device) -> GPT:
    """The model of a pretrain cell, and no other one."""
    place, cell = folder / "pretrained" / name, folder / "cells" / f"pretrain-{name}.json"
    mark = place / "settings.json"
    known = mark.is_file() and cell.is_file()
    if not known or json.loads(mark.read_text()) != json.loads(cell.read_text())["settings"]:
        raise ValueError(
            f"{place} does not hold the model that cells/{cell.name} names. Remove that file, and it is "
            "trained again; cells that are there started from another one, and the result will say so"
        )
    return GPT.from_pretrained(find_model(place), device=device).eval()


def device_of(settings: Settings) -> torch.device:
    return torch.device(settings["device"])


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Products of float32 on a GPU may round their factors, as training usually does; for a while."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
