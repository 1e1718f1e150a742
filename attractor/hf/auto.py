"""Saved retrofits with their base, as the Auto classes of transformers load them.

    import attractor
    net = AutoModelForCausalLM.from_pretrained(folder)      # a Retrofit, as `load_retrofit` gives one

The base is found where the folder says that it was loaded from.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attractor.hf.files import check_shape, dtype_of_base, loaded_from
from attractor.hf.net import Retrofit, load_retrofit
from attractor.hf.pretrained import SMOLLM2, check_source, load_pretrained

OURS_TO_DECIDE = ("config", "adapter_kwargs", "trust_remote_code", "local_files_only", "use_safetensors")
"""What AutoModelForCausalLM hands on and the base is not given: no code of its author is run, for one."""


def load_with_base(folder: str | Path, *, dtype: Any = None, **options: Any) -> Retrofit:
    """The base with the retrofit of `folder`; `options`, as `device_map`, are for loading the base."""
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: fetch a retrofit before you load it")
    own, base = dtype_of_base(folder), loaded_from(folder)
    if dtype not in (None, "auto", own, str(own).removeprefix("torch.")):
        raise ValueError(
            f"dtype={dtype} is not {own}, that of the base, which is known by its weights: load it without "
            "dtype=, and convert it afterwards"
        )
    if base is None:
        raise ValueError(
            f"{folder} does not say where its base is: load the base, and give both to "
            "attractor.load_retrofit"
        )
    given = {name: value for name, value in options.items() if name not in OURS_TO_DECIDE}
    return load_retrofit(_load_base(base, own, folder, given), folder)


def _load_base(source: str, dtype: torch.dtype, folder: str | Path, options: dict[str, Any]) -> Any:
    """A base as `load_pretrained` reads it, from safetensors or GGUF alone; it may have no tokenizer."""
    check_source(source)
    if source == SMOLLM2 or Path(source).suffix == ".gguf":
        if options:
            raise TypeError(f"{source} is a GGUF file, which is loaded without {', '.join(sorted(options))}")
        return load_pretrained(source, dtype=dtype)[0]
    trusted = {"trust_remote_code": False, "local_files_only": Path(source).exists()}
    try:
        check_shape(folder, AutoConfig.from_pretrained(source, **trusted))
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, **trusted, **options
        )
    except Exception as error:  # transformers does not say which it raises
        raise ValueError(f"the base cannot be loaded from {source}: {error}") from error
