"""attractor data list|prepare"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from attractor.corpora import CORPORA
from attractor.data import prepare


@dataclass(kw_only=True)
class DataList:
    """Name the built-in corpora."""

    def run(self) -> None:
        for corpus in CORPORA.values():
            print(f"{corpus.name:12s} {corpus.description} [{corpus.licence}]")


@dataclass(kw_only=True)
class DataPrepare:
    """Turn a corpus, a file, a folder or a glob into train.bin, val.bin and tokenizer.json."""

    source: tyro.conf.Positional[str]
    """A name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Path | None = None
    """Where to write (default: data/NAME)."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: int | None = None
    """Size of a BPE vocabulary (default: 4096)."""
    val_fraction: float = 0.1
    """The last part of the text, held out for validation."""
    size: int | None = None
    """Characters of paper-shift: 10000 for the paper's protocol, 200000 for a healthy one."""
    overwrite: bool = False
    """Replace a dataset that was prepared differently."""

    def run(self) -> None:
        out = self.out or Path("data") / Path(self.source).stem
        options: dict[str, Any] = {} if self.size is None else {"size": self.size}
        dataset = prepare(
            self.source, out, tokenizer=self.tokenizer, vocab_size=self.vocab_size,
            val_fraction=self.val_fraction, overwrite=self.overwrite,
            **options,
        )  # fmt: skip
        print(f"{out}: {len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
              f"vocabulary {dataset.tokenizer.vocab_size:,}")  # fmt: skip
