"""A pretrained model that can be taught: one layer with basins beside one of its FFNs, calibrated.

net, lessons = teachable(model, tokenizer.encode)  # or with background text of your own
lessons.learn([("Zorvan Quillbeam plays the", " cello"), ("Zorvan Quillbeam loves the", " cello")])
net.generate(...)                                  # knows it
save_lessons(net, lessons, folder)
net, lessons = load_lessons(model, tokenizer.encode, folder)
"""

import argparse
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, check_size
from attractor.continual.calibrate import CLOSED, Calibration
from attractor.continual.config import LessonConfig
from attractor.continual.lessons import Lessons
from attractor.files import check_hashes, parse_json, save_tensors, write_folder
from attractor.hf.calibrated import calibrated
from attractor.hf.causal import CausalLM
from attractor.hf.find import find_places
from attractor.hf.halves import Halves
from attractor.hf.net import Retrofit, load_retrofit, retrofit
from attractor.hf.sample import activations, sample_batches

NAME = "lessons"
FORMAT = 2
DESCRIPTION, CALIBRATION, LAYER = "lessons.json", "calibration.safetensors", "layer"
CONTEXTS = "contexts.safetensors"
RETIRED = ("contrast", "edge")
"""Settings of learning that files of this format may name and that are gone: what was learned stays."""
TEMPERATURE = 0.02
"""Inside a basin the weight rises from 0 at the edge to 0.99 within a cosine of 0.1."""


def teachable(
    model: Any,
    encode: Callable[[str], Any],
    background: Tensor | Sequence[str] | None = None,
    *,
    window: int = 256,
    windows: int = 48,
    read_from: int | None = None,
    read_attention: Sequence[int] | None = None,
    act_at: int | None = None,
    config: LessonConfig | None = None,
    patches: int = 64,
    **options: Any,
) -> tuple[Retrofit, Lessons]:
    """Retrofit a Hugging Face causal language model so that it can be taught lessons.

    `background` is text of the kinds that the model must go on to predict as before: token ids (windows,
    time), or texts, which are cut into windows, of which `windows` are read. By default it is text and
    programs that come with Python, and what is measured on that is kept in the cache. The more is read, the
    better the bound on what lessons touch.

    Subjects are recognised by what goes into the FFN of block `read_from` (default: a third of the way up)
    and by what the attention of the blocks `read_attention` added before it (default: four in the middle of
    the way there): that is where the words before the last one of a name are. What is known of subjects is
    added after the FFN of block `act_at` (default: just below the middle). There is room for so many
    `patches` at first.
    """
    check_size("window", window)
    check_size("windows", windows)
    blocks = find_places(model, "all")
    read = len(blocks) // 3 if read_from is None else read_from
    act = max(read, (len(blocks) - 1) // 2) if act_at is None else act_at
    if read_attention is None:
        read_attention = range(read // 3, 2 * read // 3 + 1) if act > read else ()
    number_of = {block.number: block for block in blocks}
    if not {read, act} <= number_of.keys() or act < read:
        raise ValueError(
            f"read_from={read}, act_at={act}: give blocks of the model, 0 to {max(number_of)}, in this order"
        )
    texts = default_background() if background is None else background
    tokens = texts if isinstance(texts, Tensor) else cut(texts, encode, window)[:windows]
    batches = sample_batches(model, tokens)
    layer = APNConfig(
        num_patches=patches, top_k=1, rank=1, temperature=TEMPERATURE, radius=CLOSED, whiten=True
    )
    net = retrofit(
        model,
        layer,
        layers=[act],
        read_from=None if act == read else read,
        read_attention=read_attention,
        dtype=torch.float32,
        name=NAME,
    )
    (apn,) = net.apn_layers().values()
    halves = Halves(net, NAME)

    def measure() -> tuple[Calibration, float]:
        with net.using(None):
            ((_, _, added),) = activations(model, [number_of[act]], batches[:1])
        assert added is not None
        seen = torch.cat([halves.read(batch) for batch in batches])
        return Calibration.fit(seen, dim=apn.dim), added.norm(dim=-1).median().item()

    try:
        if background is None:
            settings = {"read_from": read, "read_attention": [*read_attention], "act_at": act}
            calibration, unit = calibrated(model, tokens, settings, measure)
        else:
            calibration, unit = measure()
    except BaseException:
        net.unload()  # the model is as it was
        raise
    options = {"halves": halves, **options}
    return net, Lessons(CausalLM(net, NAME), apn, encode, calibration, config, unit=unit, **options)


def save_lessons(
    net: Retrofit, lessons: Lessons, folder: str | Path, *, more: Mapping[str, str] | None = None
) -> None:
    """Write lessons, their layer and its calibration; the folder appears whole or not at all.

    It may replace a folder of this kind and nothing else. `load_lessons` reads it. `more` are files of the
    caller's own, by name, that lie beside them.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / DESCRIPTION).is_file():
        raise ValueError(f"{folder} is there already and holds no lessons: choose another folder")
    calibration = {name: value.cpu() for name, value in vars(lessons.calibration).items()}
    contexts = {name: value.cpu() for name, value in lessons.tensors().items()}
    hashes = {"calibration": tensors_hash(calibration), "contexts": tensors_hash(contexts)}
    described = {"format": FORMAT, **lessons.describe(), **hashes}

    def fill(partial: Path) -> None:
        net.save_pretrained(partial / LAYER, name=NAME)
        save_tensors(calibration, partial / CALIBRATION)
        save_tensors(contexts, partial / CONTEXTS)
        (partial / DESCRIPTION).write_text(json.dumps(described, indent=1))
        for name, text in (more or {}).items():
            (partial / name).write_text(text)

    write_folder(folder.absolute(), fill)


def load_lessons(
    model: Any, encode: Callable[[str], Any], folder: str | Path, **options: Any
) -> tuple[Retrofit, Lessons]:
    """The lessons that `save_lessons` wrote, on the same base: another one, or damage, is a ValueError."""
    folder = Path(folder)
    try:
        check_hashes(folder)
        described = parse_json((folder / DESCRIPTION).read_text())
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise ValueError(f"not lessons of format {FORMAT}, which this release reads")
        calibration = Calibration(**read_hashed(folder / CALIBRATION, described["calibration"]))
        contexts = read_hashed(folder / CONTEXTS, described["contexts"])
        settings = {name: value for name, value in described["config"].items() if name not in RETIRED}
        config = LessonConfig.from_dict(settings)
    except (OSError, LookupError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no lessons that can be read: {error}") from error
    net = load_retrofit(model, folder / LAYER, name=NAME)
    try:
        (apn,) = net.apn_layers().values()
        state = {name: value.clone() for name, value in apn.state_dict().items()}
        unit, options = described["unit"], {"halves": Halves(net, NAME), **options}
        lessons = Lessons(CausalLM(net, NAME), apn, encode, calibration, config, unit=unit, **options)
        lessons.restore(described, state, contexts)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        net.unload()
        raise ValueError(f"{folder} holds no lessons that can be read: {error}") from error
    return net, lessons


def read_hashed(path: Path, wanted: str) -> dict[str, Tensor]:
    """The tensors of a file, if they are those that were saved."""
    tensors = load_file(path)
    if tensors_hash(tensors) != wanted:
        raise ValueError(f"{path.name} is not what was saved: its hash differs")
    return tensors


def default_background() -> list[str]:
    """Text that every Python has: its manual, in English, and some of its programs."""
    from pydoc_data import topics

    manual = list(topics.topics.values())
    half = len(manual) // 2
    programs = [inspect.getsource(module) for module in (argparse, textwrap)]
    return ["\n".join(manual[:half]), *programs, "\n".join(manual[half:])]


def cut(texts: Sequence[str], encode: Callable[[str], Any], window: int) -> Tensor:
    """Whole windows of each text, in turn, so that every kind of text is among the first and the last."""
    if isinstance(texts, str) or not texts:
        raise ValueError("background must be a list of texts, or token ids (windows, time)")
    tokens = [np.asarray(encode(text)) for text in texts]
    pieces = [
        [row[start : start + window] for start in range(0, len(row) - window + 1, window)] for row in tokens
    ]
    if not any(pieces):
        raise ValueError(f"no background text has {window} tokens")
    turns = range(max(map(len, pieces)))
    rows = [piece[turn] for turn in turns for piece in pieces if turn < len(piece)]
    return torch.tensor(np.stack(rows).astype(np.int64))
