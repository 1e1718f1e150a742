"""attractor data list|prepare"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from attractor.cli.common import otherwise


@dataclass(kw_only=True)
class DataList:
    """Name the built-in corpora."""

    def run(self) -> None:
        from attractor.corpora import CORPORA

        for corpus in CORPORA.values():
            print(f"{corpus.name:12s} {corpus.description} [{corpus.licence}]")


@dataclass(kw_only=True)
class DataPrepare:
    """Turn a corpus, a file, a folder or a glob into train.bin, val.bin and tokenizer.json."""

    source: tyro.conf.Positional[str]
    """A name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Annotated[Path | None, otherwise("data/NAME", "PATH")] = None
    """The folder to write."""
    tokenizer: str = "char"
    """"char", "byte", "bpe", or the tokenizer.json of another dataset."""
    vocab_size: Annotated[int | None, otherwise("4096 for bpe, else as many as there are", "INT")] = None
    """Size of a BPE vocabulary."""
    val_fraction: float = 0.1
    """The last part of the text, held out for validation."""
    size: Annotated[int | None, otherwise("the corpus's own", "INT")] = None
    """Characters of paper-shift: 10000 for the paper's protocol, 200000 for a healthy one."""
    overwrite: bool = False
    """Replace a dataset that was prepared differently."""

    def run(self) -> None:
        from attractor.data import prepare

        out = self.out or Path("data") / Path(self.source).stem
        options: dict[str, Any] = {} if self.size is None else {"size": self.size}
        dataset = prepare(
            self.source,
            out,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            val_fraction=self.val_fraction,
            overwrite=self.overwrite,
            **options,
        )
        print(
            f"{out}: {len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
            f"vocabulary {dataset.tokenizer.vocab_size:,}"
        )


DATA = {"list": DataList, "prepare": DataPrepare}
