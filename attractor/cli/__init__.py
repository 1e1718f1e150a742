"""The command line. Verbs are a table: only the module of the chosen one is imported, so help is quick."""

import difflib
import logging
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple, NoReturn, Union

from attractor.cli.common import INTERRUPTED, mistakes
from attractor.version import __version__


class Verb(NamedTuple):
    """A verb of the command line, and where its command is: a class with `run`, or several by name."""

    module: str
    name: str
    about: str
    example: str

    def command(self) -> Any:
        return getattr(import_module(f"attractor.cli.{self.module}"), self.name)


GROUPS: dict[str, dict[str, Verb]] = {
    "Ask a model, and teach it": {
        "ask": Verb("lessons", "Ask", "Ask a model a question.", 'ask smollm2-135m "What is a haiku?"'),
        "chat": Verb("lessons", "Chat", "Talk with a model in the terminal.", "chat smollm2-135m"),
        "teach": Verb(
            "lessons",
            "Teach",
            "Teach a model a lesson, and test that it knows it.",
            'teach smollm2-135m --form "Zorvan Quillbeam plays the => cello" '
            '--form "The instrument of Zorvan Quillbeam is the => cello" --save school',
        ),
        "lessons": Verb(
            "lessons", "ListLessons", "List lessons, or forget some.", "lessons school --forget 0"
        ),
    },
    "Train a model of your own": {
        "train": Verb(
            "train",
            "TRAIN",
            "Train a model from a preset, on a corpus or on a text of your own.",
            "train tiny_apn --data my.txt",
        ),
        "compare": Verb(
            "train",
            "Compare",
            "Train a dense and an APN model of equal size on a text, and compare them.",
            "compare my.txt",
        ),
        "sample": Verb(
            "models", "Sample", "Write text with a model.", 'sample runs/tiny_apn --prompt "ROMEO:"'
        ),
        "info": Verb(
            "models", "Info", "Describe a model, or what this machine can run.", "info runs/tiny_apn"
        ),
        "data": Verb("data", "DATA", "List and prepare texts.", "data prepare my-notes/ --tokenizer bpe"),
        "demo": Verb("demo", "Demo", "Teach a model, ask it, compare dense and APN, write a report.", "demo"),
    },
    "Keep learning": {
        "adapt": Verb(
            "continual",
            "Adapt",
            "Teach a model texts, patch by patch.",
            "adapt runs/tiny_apn --data kjv --guard",
        ),
        "overlays": Verb(
            "continual",
            "Overlays",
            "Look after what `adapt --guard` learned.",
            "overlays runs/tiny_apn-adapted list",
        ),
        "monitor": Verb(
            "continual", "Monitor", "Show what routers do with texts.", "monitor runs/tiny_apn --data kjv"
        ),
        "retrofit": Verb(
            "retrofit",
            "RetrofitModel",
            "Give a Hugging Face model APN layers, and teach them a text.",
            "retrofit smollm2-135m --data first-folio",
        ),
    },
    "Serve": {
        "serve": Verb(
            "serve",
            "Serve",
            "Answer requests over HTTP, and learn while doing so.",
            "serve runs/tiny_apn --learn",
        ),
        "keys": Verb("store", "Keys", "Make a key for a server.", "keys keys.json --scopes generate learn"),
        "store": Verb(
            "store",
            "StoreCommand",
            "Check, list or copy what a server keeps.",
            "store verify runs/tiny_apn-served",
        ),
    },
    "Measure": {
        "bench": Verb(
            "bench", "BENCH", "Measure speed and memory beside the dense FFN.", "bench layer --rounds 3"
        )
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}

RENAMED = {
    ("train", "--data.source"): "--data",
    ("train", "--data.tokenizer"): "--tokenizer",
    ("train", "--data.vocab-size"): "--vocab-size",
    ("train", "--data.val-fraction"): "--val-fraction",
    ("serve", "--data-dir"): "--store",
    ("serve", "--limits.lessons"): "--limits.learning",
    ("serve", "--rules.lesson-tokens"): "--rules.text-tokens",
}
"""Options of earlier releases, and what they are called now."""

MOVED = (
    "`attractor {}` is no command any more. What reproduces the paper and the benchmark is in the folder "
    "studies/ of the repository: there, `python -m studies list` names the studies, and "
    "`python -m studies report` shows their results"
)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch: threads that wait must not spin
    if arguments == ["--version"]:
        print(f"attractor {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    try:
        command = parse(arguments)
        done = command.run() or 0
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # `attractor ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's own flush does not complain
        return 0
    except KeyboardInterrupt:
        print("attractor: interrupted; what was saved is kept", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not isinstance(error, mistakes()):
            raise
        print(f"attractor: {error}", file=sys.stderr)
        return 1


def parse(arguments: list[str]) -> Any:
    """The command that a person typed, ready to run. A mistake ends the program with status 2."""
    import tyro

    name, *rest = arguments
    if name.startswith("--tyro-"):  # completion for a shell needs every verb
        verbs = {name: verb.command() for name, verb in VERBS.items()}
        return tyro.cli(_choice(verbs), args=arguments, prog="attractor")
    if name in ("experiment", "report"):
        _stop(MOVED.format(name))
    _check_known("attractor", name, VERBS)
    for given in rest:
        option = given.split("=")[0].replace("_", "-")
        if (new := RENAMED.get((name, option))) is not None:
            _stop(f"{option} of `attractor {name}` is called {new} now")
    verb, program = VERBS[name], f"attractor {name}"
    command, about = verb.command(), verb.about
    if isinstance(command, dict) and rest and not rest[0].startswith("-"):
        _check_known(program, rest[0], command)
        program, command, rest = f"{program} {rest[0]}", command[rest[0]], rest[1:]
    if not isinstance(command, dict):
        about = cleandoc(command.__doc__)
    if f"attractor {verb.example} ".startswith(f"{program} "):
        about += f"\n\nExample: attractor {verb.example}"
    kind = _choice(command) if isinstance(command, dict) else _kind(command)
    return tyro.cli(kind, args=rest, prog=program, description=about, **_default(command))


def _check_known(program: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{program} {near[0]}`?" if near else f"there are: {', '.join(known)}."
        _stop(f"{name!r} is no command of `{program}`; {hint} `{program} --help` describes all of them")


def _stop(problem: str) -> NoReturn:
    print(f"attractor: {problem}", file=sys.stderr)
    raise SystemExit(2)


def _kind(command: Any) -> Any:
    return command if isinstance(command, type) else type(command)


def _default(command: Any) -> dict[str, Any]:
    """Make a ready-made command the default: what is not typed stays as it is there."""
    return {} if isinstance(command, type | dict) else {"default": command}


def _choice(commands: dict[str, Any]) -> Any:
    """Commands by name as one type: classes, ready-made commands, and further choices."""
    import tyro

    parts = []
    for name, command in commands.items():
        is_choice = isinstance(command, dict)
        about = VERBS[name].about if is_choice else cleandoc(command.__doc__)
        named = tyro.conf.subcommand(name, description=about, **_default(command))
        parts.append(Annotated[_choice(command) if is_choice else _kind(command), named])
    return Union[tuple(parts)]  # noqa: UP007 (of a tuple)


def overview() -> str:
    """What `attractor --help` shows: every verb with an example."""
    lines = [
        "usage: attractor VERB ...",
        "",
        "Load, teach, train and serve language models with Attractor Patch Networks.",
        "`attractor VERB --help` describes every option of a verb.",
        "",
        "MODEL is a run, a saved model or learner, a retrofit, saved lessons, a Hugging Face folder or",
        "ORGANISATION/NAME, a .gguf file, or smollm2-135m, which is fetched and checked.",
    ]
    for title, verbs in GROUPS.items():
        lines += ["", title]
        for name, verb in verbs.items():
            lines += [f"  {name:9s} {verb.about}", f"            attractor {verb.example}"]
    return "\n".join(lines)
