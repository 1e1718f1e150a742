"""Train, sample and study Attractor Patch Networks. `attractor VERB --help` tells what a verb takes."""

import logging
import sys
from typing import Annotated, Any

import tyro

from attractor import presets
from attractor.cli.bench import BenchDecode, BenchLayer, BenchTrain
from attractor.cli.common import INTERRUPTED, MISTAKES
from attractor.cli.continual import Adapt, Monitor, Overlays
from attractor.cli.data import DataList, DataPrepare
from attractor.cli.demo import Demo
from attractor.cli.models import Info, Sample, Train
from attractor.cli.retrofit import RetrofitModel
from attractor.cli.serve import Keys, Serve, StoreCommand
from attractor.version import __version__

MOVED = (
    "attractor: `attractor {}` is no command any more. What reproduces the paper and the benchmark is in the "
    "folder studies/ of the repository: there, `python -m studies list` names the studies, and "
    "`python -m studies report` shows their results"
)


def _commands() -> Any:
    """The tree of verbs as a type: tyro makes parser, help and completion from it."""
    train = tyro.extras.subcommand_type_from_defaults(
        {name: Train(config=preset(), preset=name) for name, preset in presets.NAMES.items()},
        {name: preset.__doc__ or "" for name, preset in presets.NAMES.items()},
    )
    verb = tyro.conf.subcommand
    return (
        Annotated[
            Annotated[DataList, verb("list")] | Annotated[DataPrepare, verb("prepare")],
            verb("data", description="List and prepare texts."),
        ]
        | Annotated[train, verb("train", description="Train a model from a preset.")]
        | Annotated[Sample, verb("sample")]
        | Annotated[Info, verb("info")]
        | Annotated[Adapt, verb("adapt")]
        | Annotated[Overlays, verb("overlays")]
        | Annotated[Monitor, verb("monitor")]
        | Annotated[RetrofitModel, verb("retrofit")]
        | Annotated[Serve, verb("serve")]
        | Annotated[Keys, verb("keys")]
        | Annotated[StoreCommand, verb("store")]
        | Annotated[Demo, verb("demo")]
        | Annotated[
            Annotated[BenchLayer, verb("layer")]
            | Annotated[BenchTrain, verb("train")]
            | Annotated[BenchDecode, verb("decode")],
            verb("bench", description="Measure speed and memory, always beside the dense FFN."),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if arguments == ["--version"]:
        print(f"attractor {__version__}")
        return 0
    if arguments[:1] in (["experiment"], ["report"]):
        print(MOVED.format(arguments[0]), file=sys.stderr)
        return 1
    try:
        command = tyro.cli(_commands(), args=arguments, prog="attractor", description=__doc__)
        return command.run() or 0
    except MISTAKES as error:
        print(f"attractor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("attractor: interrupted; what was saved is kept", file=sys.stderr)
        return INTERRUPTED
