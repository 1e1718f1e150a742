"""What several verbs need: the text of a run, a bar that follows one, and options that are spelled once.

Nothing here imports torch before a verb runs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attractor.config import RunConfig

if TYPE_CHECKING:
    import numpy as np

    from attractor.data import Dataset
    from attractor.tokenizer import Tokenizer

INTERRUPTED = 75
"""Exit code of a run that a signal stopped after saving: run it again with --resume auto."""


def otherwise(what: str, shown: str, help: str | None = None) -> Any:
    """Describe an option whose default says nothing: what happens then, and the word for its value.

    `help` says what it is for, where no text below the option does.
    """

    def hint(default: str) -> str:
        return f"(default: {what if default in ('None', '') else default})"

    return tyro.conf.arg(help_behavior_hint=hint, metavar=shown, help=help)


Device = Annotated[str | None, otherwise("the GPU if there is one", "NAME", "cpu, cuda, cuda:1, ...")]
JSONFile = Annotated[
    Path | None, otherwise("nowhere", "PATH", "The file that the numbers are written to, as JSON.")
]
ModelName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
ANY = "A run, a saved model or learner, a retrofit, saved lessons, a Hugging Face model, or smollm2-135m."
AnyModel = Annotated[ModelName, tyro.conf.arg(help=ANY)]


Kind = type[Exception]


def mistakes() -> tuple[Kind, Kind, Kind, Kind, Kind]:
    """The exceptions that are shown as one line and not as a traceback."""
    from attractor.continual.update import NotFiniteUpdate
    from attractor.corpora import CorpusUnavailable
    from attractor.trainer import NotFiniteLoss

    return (ValueError, OSError, CorpusUnavailable, NotFiniteLoss, NotFiniteUpdate)


def dataset_of(config: RunConfig) -> "Dataset":
    from attractor.data import Dataset, prepare

    data = config.data
    folder = Path(data.source)
    if (folder / "meta.json").is_file():
        return Dataset.open(folder)
    return prepare(
        data.source,
        Path("data") / f"{folder.stem}-{Path(data.tokenizer).stem}",
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        val_fraction=data.val_fraction,
    )


def run_folder(model: str | Path) -> Path | None:
    """Return the folder of the model, if this is a run or a saved model of ours."""
    from attractor.checkpoint import find_model
    from attractor.front import adapter_folder

    place = Path(model)
    return find_model(place) if place.is_dir() and adapter_folder(place) is None else None


def has_overlays(folder: Path) -> bool:
    """Whether a learner with overlays lies in this folder, or where `attractor adapt` puts it."""
    return any((place / "guard.json").is_file() for place in (folder, folder / "learner"))


def validation_text(folder: Path | None) -> "np.ndarray | None":
    """The validation tokens of a run whose model is in this folder, if the run says which text it learned."""
    import numpy as np

    from attractor.tokenizer import load as load_tokenizer

    if folder is None or not (folder / "run.json").is_file():
        return None
    try:
        dataset = dataset_of(RunConfig.from_json((folder / "run.json").read_text()))
    except ValueError as error:
        raise ValueError(f"{error}. Without the validation text of {folder}, name another one") from error
    if dataset.tokenizer != load_tokenizer(folder / "tokenizer.json"):
        raise ValueError(
            f"the text of {folder} has changed since: its characters or words have other numbers now. Name "
            "another text"
        )
    return np.asarray(dataset.val).astype(np.int64)


def known_tokens(source: str, tokenizer: "Tokenizer", most: int | None = None) -> "np.ndarray":
    """Encode a text for a model that may not know all of its characters; a line says which are left out."""
    from attractor.data import read_text
    from attractor.tokenizer import describe

    tokens, dropped = tokenizer.encode_known(read_text(source))
    if dropped:
        print(f"{source}: left out {describe(dropped)}, which the model does not know", file=sys.stderr)
    if len(tokens) < 2:
        raise ValueError(f"{source!r} holds nothing the model knows")
    return tokens[:most]


class progress_bar:
    """A tqdm bar that follows the records of a run; evaluations stay on the screen as lines."""

    def __init__(self, steps: int, name: str, *, shown: bool = True, **options: Any) -> None:
        from tqdm import tqdm

        options = {"unit": "step", "mininterval": 0.5, **options}
        self.bar = tqdm(total=steps, desc=name, disable=not shown, **options)

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: dict[str, Any]) -> None:
        doing = record.get("doing", "")  # of several models, which one
        self.bar.n = record.get("done", record["step"])
        if doing:
            self.bar.set_description_str(doing, refresh=False)
        if "train/loss" in record:
            speed = record["train/tokens_per_second"]
            self.bar.set_postfix_str(f"loss {record['train/loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if record.get("val/ppl") is not None:
            line = f"{doing:14s} step {record['step']:6d}  validation perplexity {record['val/ppl']:.4f}"
            self.bar.write(line.lstrip(), file=sys.stderr)  # stdout is for the result
        self.bar.refresh()
