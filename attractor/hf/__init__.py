"""APN layers in Hugging Face causal language models: beside their FFNs or in place of them, and reversible.

    net = attractor.retrofit(model, APNConfig(num_patches=64, top_k=4, rank=16), layers="all", mode="beside")
    net.print_trainable_parameters()               # everything but the APN layers is frozen
    net.save_pretrained(folder); attractor.load_retrofit(model, folder); net.unload()
    transformers.AutoModelForCausalLM.from_pretrained(folder)       # all of it

Nothing here imports transformers but `callback`, `known`, `auto`, `gpt`, `words` and `caches`: a program that
has a model to retrofit has it already.
"""

from importlib import import_module

from attractor.announce import AUTO, PARTS
from attractor.hf.causal import CausalLM
from attractor.hf.net import Retrofit, load_retrofit, retrofit

__all__ = ["CausalLM", "Retrofit", "load_retrofit", "register", "retrofit"]


def register() -> None:
    """Let the Auto classes of transformers read saved retrofits and GPTs.

    `import attractor` does so by itself, as soon as these classes are imported.
    """
    for part in PARTS:
        import_module(AUTO + part)
