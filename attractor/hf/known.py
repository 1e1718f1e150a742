"""What the Auto classes of transformers are told of this package, while they are being imported.

Then most of transformers cannot be imported yet: the classes that load are named, and imported when they are
used. `attractor.announce` calls this.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from attractor.config import GPTConfig
from attractor.hf.card import MODEL_TYPE as RETROFIT
from attractor.model import MODEL_TYPE as GPT
from attractor.model import own_fields


class RetrofitConfig(PreTrainedConfig):
    """The config.json of a saved retrofit, which says no more than its type; `net.config` is the base's."""

    model_type = RETROFIT

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        return super().from_dict({}, **options)


class HubGPTConfig(PreTrainedConfig):
    """The configuration of a GPT, in the field `gpt`, for transformers."""

    model_type = GPT

    def __init__(self, gpt: dict[str, Any] | None = None, **others: Any) -> None:
        own = GPTConfig() if gpt is None else GPTConfig.from_dict(gpt)
        self.gpt = own.to_dict()
        super().__init__(**{"tie_word_embeddings": False, **others})
        self.vocab_size, self.hidden_size = own.vocab_size, own.dim
        self.num_hidden_layers, self.max_position_embeddings = own.num_layers, own.context

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Read transformers' own fields, or what `GPT.save_pretrained` writes, which is the GPT's alone."""
        if "gpt" not in config_dict:
            told = {name: value for name, value in config_dict.items() if not name.startswith("_")}
            config_dict = {"gpt": own_fields(told)}  # transformers adds fields with an underscore
        return super().from_dict(config_dict, **options)


def later(home: str, name: str) -> type:
    """A class that stands for `name` in the module `home`, and imports it when something is to be loaded."""

    def load(method: str) -> Any:
        return classmethod(
            lambda cls, *given, **options: getattr(getattr(import_module(home), name), method)(
                *given, **options
            )
        )

    return type(name, (), {method: load(method) for method in ("from_pretrained", "_from_config")})


def register(part: str, module: ModuleType) -> None:
    """Tell one module of the Auto classes what it can read."""
    if part == "configuration_auto":
        module.AutoConfig.register(RETROFIT, RetrofitConfig, exist_ok=True)
        module.AutoConfig.register(GPT, HubGPTConfig, exist_ok=True)
    elif part == "modeling_auto":
        models = module.AutoModelForCausalLM
        models.register(RetrofitConfig, later("attractor.hf.net", "Retrofit"), exist_ok=True)
        models.register(HubGPTConfig, later("attractor.hf.gpt", "GPTForCausalLM"), exist_ok=True)
    else:
        words = later("attractor.hf.words", "OwnTokenizer")
        module.AutoTokenizer.register(HubGPTConfig, words, exist_ok=True)
