"""A GPT of this package as a model of transformers: `AutoModelForCausalLM` reads what it saves.

    gpt.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)    # the same logits; model.gpt is the GPT
    GPTForCausalLM.of(gpt)                                  # the same without a folder

It reads texts without padding, and generates with a dynamic cache or with none.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attractor.config import GPTConfig
from attractor.files import HASHES, check_hashes, hashing, write_text
from attractor.hf.card import gpt_card
from attractor.hf.known import HubGPTConfig
from attractor.model import GPT, KVCache


class TheirCache(KVCache):
    """Keys and values that a cache of transformers keeps."""

    def __init__(self, cache: Any) -> None:
        if type(cache) is not DynamicCache:
            raise ValueError(
                f"a GPT of attractor cannot use a {type(cache).__name__}: leave cache_implementation= out, "
                "or give use_cache=False"
            )
        self.cache, self.length = cache, cache.get_seq_length()

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.cache.update(keys, values, layer)
        return found


class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    """A `GPT` in the clothes of transformers."""

    config_class = HubGPTConfig
    base_model_prefix = "gpt"

    def __init__(self, config: HubGPTConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(GPTConfig.from_dict(config.gpt))
        self.post_init()

    @classmethod
    def of(cls, gpt: GPT) -> "GPTForCausalLM":
        """A copy of a GPT, with the patches that its layers have by now."""
        model = cls(HubGPTConfig(gpt.config_now().to_dict()))
        model.gpt.load_state_dict(gpt.state_dict())
        return model.to(gpt.embedding.weight.dtype).train(gpt.training)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """A GPT starts itself."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with `labels` the loss; `others` are for the loss of transformers."""
        cache = None if past_key_values is None else TheirCache(past_key_values)
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("a GPT of attractor reads no padding: give texts of one length")
        logits = self.gpt(input_ids, cache=cache)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a saved GPT; a tensor that is missing or too many is a ValueError."""
        folder = Path(arguments[0])
        check_hashes(folder)
        try:
            if folder.is_dir():
                config = options.get("config") or cls.config_class.from_pretrained(folder)
                _check_fit(folder, GPTConfig.from_dict(config.gpt))
            model, found = super().from_pretrained(*arguments, output_loading_info=True, **options)
        except (OSError, ValueError):
            raise
        except Exception as error:  # transformers does not say which it raises
            raise ValueError(f"{arguments[0]} holds no model that can be read: {error}") from error
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found[what]:
                raise ValueError(f"{arguments[0]} does not fit its config.json: {what} {sorted(found[what])}")
        return (model, found) if output_loading_info else model

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write safetensors, the configuration, and a model card unless there is one."""
        self.config.gpt = self.gpt.config_now().to_dict()  # layers may have grown
        folder = Path(save_directory)
        (folder / HASHES).unlink(missing_ok=True)
        super().save_pretrained(save_directory, **options)
        if folder.is_dir():  # with push_to_hub it may not be
            own = [*folder.glob("*config.json"), *folder.glob("*.safetensors*")]
            with hashing(folder, *sorted(path.name for path in own)):
                pass
        card = folder / "README.md"
        if not card.exists():
            write_text(card, gpt_card(self.config.gpt, self.gpt.num_parameters()))


def _check_fit(folder: Path, config: GPTConfig) -> None:
    """A ValueError unless the files of transformers hold the tensors of such a GPT; none is read."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                shapes[name.removeprefix("gpt.")] = file.get_slice(name).get_shape()
    try:
        GPT.empty(config, shapes)
    except ValueError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
