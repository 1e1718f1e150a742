"""The tokenizers of this package as those of transformers: `AutoTokenizer` reads what lies beside a GPT."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attractor import tokenizer
from attractor.files import parse_json


class OwnTokenizer(PreTrainedTokenizerFast):
    """What `AutoTokenizer` takes for a GPT; it gives a tokenizer of transformers like any other."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, *arguments: Any, **options: Any) -> PreTrainedTokenizerFast:
        """Read tokenizer.json: ours, or as transformers writes it."""
        path = Path(folder) / "tokenizer.json"
        if path.is_file() and "kind" not in parse_json(path.read_bytes()):
            return PreTrainedTokenizerFast.from_pretrained(folder, *arguments, **options)
        return as_fast(tokenizer.load(path))


def as_fast(own: tokenizer.Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids for the same text; a character that a char tokenizer does not know is an error, too."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_in_library(own),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _in_library(own: tokenizer.Tokenizer) -> Tokenizer:
    if isinstance(own, tokenizer.LibraryTokenizer):
        return Tokenizer.from_str(own.library_json())
    if isinstance(own, tokenizer.CharTokenizer):
        found = Tokenizer(models.WordLevel({character: i for i, character in enumerate(own.characters)}))
        found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        found.decoder = decoders.Fuse()
        return found
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # by byte-level BPE
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    found = Tokenizer(models.BPE(letters, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found
