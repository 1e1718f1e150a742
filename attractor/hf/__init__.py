"""APN layers in Hugging Face causal language models: beside their FFNs or in place of them, and reversible.

    net = attractor.retrofit(model, APNConfig(num_patches=64, top_k=4, rank=16), layers="all", mode="beside")
    net.print_trainable_parameters()               # everything but the APN layers is frozen
    net.save_pretrained(folder); attractor.load_retrofit(model, folder); net.unload()
    attractor.hf.register(); AutoModelForCausalLM.from_pretrained(folder)

Nothing here imports transformers but `callback`, `auto` and `gpt`: a program that has a model to retrofit has
it already.
"""

from attractor.hf.causal import CausalLM
from attractor.hf.net import Retrofit, load_retrofit, retrofit

__all__ = ["CausalLM", "Retrofit", "load_retrofit", "register", "retrofit"]


def register() -> None:
    """Let the Auto classes of transformers read saved retrofits, and what `GPTForCausalLM` saves.

    >>> import attractor.hf
    >>> attractor.hf.register()
    >>> from transformers import AutoModelForCausalLM
    >>> net = AutoModelForCausalLM.from_pretrained("runs/folio/adapter")  # doctest: +SKIP
    """
    import attractor.hf.auto  # to import them is to register
    import attractor.hf.gpt  # noqa: F401
