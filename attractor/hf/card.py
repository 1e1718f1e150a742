"""The files beside a saved model that others read: a model card, and what other loaders say of the folder.

`AutoModelForCausalLM` prints the model type that it does not know, and `PeftModel` the type of adapter: both
say what to do instead.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_TYPE = "attractor_retrofit, which the package attractor-patch-networks loads: see README.md"
PEFT_TYPE = "none: this is a retrofit, which attractor.load_retrofit(base, folder) loads and peft does not"
"""Also in place of the base's name, which transformers looks for in a folder without config.json."""
LICENCE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*['\"]?([\w.+-]+)['\"]?[ \t]*\n(?:.*\n)*?---\n")
LICENCES = {"smollm2-135m": "apache-2.0"}
"""Of the bases that this package finds by names of its own."""


def licence_of(base: str | None) -> str | None:
    """The licence of a base, where it is a name of ours or a folder whose own card tells it."""
    if base is None or base in LICENCES:
        return LICENCES.get(base or "")
    try:
        found = LICENCE.match((Path(base) / "README.md").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found[1] if found else None


def model_card(described: Mapping[str, Any]) -> str:
    """The README.md of a retrofit, by its description alone."""
    base, layers = described["base"], described["layers"]
    source, licence = base["loaded_from"], base["licence"]
    is_named = source is not None and not Path(source).is_absolute()
    header = [
        "library_name: attractor-patch-networks",
        "pipeline_tag: text-generation",
        *([f"base_model: {source}"] if is_named and "/" in source else []),
        *([f"license: {licence}"] if licence else []),
        "tags:",
        "- attractor-patch-networks",
    ]
    shapes = sorted(
        {f"{own['top_k']} of {own['num_patches']}, rank {own['rank']}" for own in layers.values()}
    )
    rows = {
        "base": f"{source} ({base['class']})" if is_named else f"a {base['class']}",
        "weights of the base": f"SHA-256 {base['weights']}",
        "licence of the base": licence or "not known: ask its author before you publish this",
        "layers": f"{len(layers)}, {described['mode']} the FFN" + ("s" if len(layers) > 1 else ""),
        "patches": "; ".join(sorted(shapes)),
        "written by": f"attractor {described['attractor']}, transformers {described['transformers']}",
        **described["about"],
    }
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"""---
{chr(10).join(header)}
---

# APN layers for {source if is_named else base["class"]}

These are Attractor Patch layers {described["mode"]} the FFNs of a language model, and not the model itself.

```python
import attractor  # pip install "attractor-patch-networks[hf]"

model = attractor.load("this-folder")  # finds the base where it was loaded from
net = attractor.load_retrofit(base, "this-folder")  # onto a base that you have loaded
```

With `attractor.hf.register()`, `AutoModelForCausalLM.from_pretrained("this-folder")` does so too.

| | |
|---|---|
{table}

The layers fit this base alone, which is known by its weights; another one is refused.
"""


def gpt_card(config: Mapping[str, Any], parameters: int) -> str:
    """The README.md of a GPT of this package, by its configuration."""
    shape = ("ffn", "num_layers", "dim", "num_heads", "context", "vocab_size")
    table = "\n".join(f"| {name} | {config[name]} |" for name in shape)
    return f"""---
library_name: attractor-patch-networks
pipeline_tag: text-generation
tags:
- attractor-patch-networks
---

# A GPT of Attractor Patch Networks

```python
import attractor  # pip install "attractor-patch-networks[hf]"
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this-folder")
```

| | |
|---|---|
{table}
| parameters | {parameters:,} |
"""


def _cell(value: object) -> str:
    """Text that cannot leave its cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
