"""attractor ask|chat|teach|lessons"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attractor.cli.common import AnyModel, Device, ModelName, has_overlays, otherwise
from attractor.config import check_size
from attractor.continual.forms import SHOWN, about_each, check_forms
from attractor.corpora import read_file
from attractor.files import alone_with, check_hashes, parse_json, recover_folder

if TYPE_CHECKING:
    from attractor.continual.lessons import Lesson
    from attractor.front import Model, Taught

ARROW = "=>"
LESSONS = "lessons.json"
TEXTS = (".txt", ".md")
OWN_PATCHES = ("model.safetensors", "checkpoints", "learner", "adapter", "adapter_config.json")
"""What lies in a run, a saved model, an adaptation or a retrofit."""


@dataclass(kw_only=True)
class Ask:
    """Ask a model a question; its likeliest answer goes to the standard output."""

    model: AnyModel
    question: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUESTION")]
    """What the model is asked."""
    max_tokens: int = 60
    """The most tokens of an answer."""
    device: Device = None

    def run(self) -> int:
        from attractor.front import load

        check_size("max_tokens", self.max_tokens)
        if not self.question.strip():
            raise ValueError("the question is empty")
        model = load(self.model, device=self.device)
        messages = [{"role": "user", "content": self.question}]
        answer = model.ask(self.question, max_tokens=self.max_tokens)
        print(answer)
        if model.lessons():
            print(which_lessons(model, model.prompt_for(messages) + answer), file=sys.stderr)
        return 0


@dataclass(kw_only=True)
class Chat:
    """Talk with a model in the terminal; it remembers the conversation. Ctrl-C or Ctrl-D ends it."""

    model: AnyModel
    max_tokens: int = 200
    """The most tokens of an answer."""
    temperature: float = 0.0
    """0 always takes the likeliest token."""
    device: Device = None

    def run(self) -> int:
        from attractor.front import load

        check_size("max_tokens", self.max_tokens)
        model = load(self.model, device=self.device)
        if sys.stdin.isatty():
            import readline  # noqa: F401 (importing it gives input() a history and the arrow keys)

            print("Ctrl-C or Ctrl-D ends the conversation.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        try:
            while True:
                said = input("> " if sys.stdin.isatty() else "").strip()
                if said:
                    messages.append({"role": "user", "content": said})
                    messages.append({"role": "assistant", "content": self._answer(model, messages)})
        except (EOFError, KeyboardInterrupt):
            print("\nGood bye.", file=sys.stderr)
        return 0

    def _answer(self, model: "Model", messages: list[dict[str, str]]) -> str:
        answer = ""
        for piece in model.reply(messages, max_tokens=self.max_tokens, temperature=self.temperature):
            print(piece, end="", flush=True)
            answer += piece
        print()
        return answer.strip()


@dataclass(kw_only=True)
class Teach:
    """Teach a model, test that it knows what it was taught, and save it.

    A form is a sentence, or "PROMPT => ANSWER". A lesson is known better in several forms. What is not known
    afterwards is taken back and not saved, and the command ends with status 1. Lessons that lie in the folder
    already stay. Each lesson is saved when it is known, and one that was taught before in the same words is
    passed over: after an interruption the same command goes on.
    """

    model: ModelName
    """Saved lessons to add to, a Hugging Face model or smollm2-135m; or one with APN layers of its own."""
    forms: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="form")] = ()
    """A form of what is to be known; give this option several times."""
    file: Annotated[Path | None, otherwise("--form alone", "PATH")] = None
    """A .txt or .md file, whose sentences are a lesson for each thing they are about. Or a .json or .jsonl
    file of forms of one lesson, or of lessons: {"subject": ..., "forms": [...]}."""
    subject: Annotated[str | None, otherwise("the longest text that all forms share", "TEXT")] = None
    """What the lesson is about."""
    save: Annotated[Path | None, otherwise("MODEL, if that is a folder with lessons", "PATH")] = None
    """The folder to write; every verb takes it as a MODEL."""
    device: Device = None

    def run(self) -> int:
        wanted = self._lessons()
        folder = self._folder()
        with alone_with(folder):
            return self._teach(wanted, folder)

    def _teach(self, wanted: Sequence[tuple[list[Any], str | None]], folder: Path) -> int:
        from tqdm import tqdm

        from attractor.front import load

        model = load(self._start(folder), device=self.device)
        gone = {old for lesson in model.lessons() for old in getattr(lesson, "overrides", ())}
        taught = {lesson.forms: lesson for lesson in model.lessons() if lesson.number not in gone}
        known = missed = 0
        for number, (forms, subject) in enumerate(wanted, 1):
            if (old := taught.get(check_forms(forms))) is not None:
                print(f"lesson {old.number} about {old.subject!r} says this already")
                known += 1
                continue
            count = f" {number} of {len(wanted)}" if len(wanted) > 1 else ""
            # nothing is counted before the first pass
            with tqdm(unit="pass", leave=False, desc=f"preparing{count}", bar_format="{desc} ...") as bar:

                def show(done: int, known: float, bar: Any = bar, doing: str = f"learning{count}") -> None:
                    if bar.total is None:
                        bar.bar_format = None
                        bar.set_description_str(doing, refresh=False)
                        bar.reset(total=model.most_passes)  # its clock, too
                    bar.n = done
                    bar.set_postfix_str(f"{known:.0%} predicted")

                lesson = model.learn(forms, subject=subject, report=show)
            print(described(lesson), flush=True)
            if lesson.known < 1:
                missed += 1
                continue
            known += 1
            model.save(folder)
        if known:
            print(f"saved in {folder}: try `attractor ask {folder} ...`")
        return 1 if missed else 0

    def _lessons(self) -> list[tuple[list[Any], str | None]]:
        lessons: list[tuple[list[Any], str | None]] = []
        forms: list[Any] = [read_form(form) for form in self.forms]
        is_text = self.file is not None and self.file.suffix in TEXTS
        if self.file is not None and is_text:
            lessons += read_text(self.file, self.subject)
        for entry in [] if self.file is None or is_text else read_entries(self.file):
            if isinstance(entry, dict) and "forms" in entry:
                lessons.append(([read_form(form) for form in entry["forms"]], entry.get("subject")))
            else:
                forms.append(read_form(entry))
        if forms:
            lessons.append((forms, self.subject))
        if not lessons:
            raise ValueError('there is nothing to teach: give --form "PROMPT => ANSWER", or --file')
        return lessons

    def _start(self, folder: Path) -> str | Path:
        """The model, or the folder itself if it has lessons of that model: they would be lost."""
        from attractor.front import base_of_lessons
        from attractor.hf.files import whole_path

        recover_folder(folder)  # if a kill came between two names, its lessons lie under another one
        if not folder.exists() or (Path(self.model).exists() and Path(self.model).samefile(folder)):
            return self.model
        if not (folder / LESSONS).is_file():
            raise ValueError(f"{folder} has learned something else: teach {folder}, or choose another --save")
        if (base := base_of_lessons(folder)) != whole_path(self.model):
            raise ValueError(f"{folder} has lessons of {base}, not of {self.model}: choose another --save")
        print(f"{folder} has lessons of {self.model} already: what is new is added to them")
        return folder

    def _folder(self) -> Path:
        if self.save is None and not (Path(self.model) / LESSONS).is_file():
            raise ValueError("name a folder for what is learned: --save FOLDER")
        folder = Path(self.model) if self.save is None else self.save
        known = ((folder / name).is_file() for name in (LESSONS, "learner.json"))
        if folder.exists() and not any(known):
            raise ValueError(f"--save {folder} is there already and holds no lessons: choose another folder")
        return folder


@dataclass(kw_only=True)
class ListLessons:
    """List the lessons in a folder that `attractor teach` wrote, or forget some of them."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """What `attractor teach` or `Model.save` wrote."""
    forget: Annotated[tuple[int, ...] | None, otherwise("none", "NUMBERS")] = None
    """Numbers of lessons to take back: the model answers as if they had never been taught."""
    device: Device = None

    def run(self) -> int:
        if not (self.folder / LESSONS).is_file():
            raise ValueError(self._why_none())
        lessons = self._read()
        known = {lesson["number"] for lesson in lessons}
        if self.forget == ():
            raise ValueError(
                f"--forget names no lesson: give numbers, as in --forget {min(known, default=0)}; there are "
                f"{sorted(known)}"
            )
        if unknown := set(self.forget or ()) - known:
            raise ValueError(f"there is no lesson {min(unknown)}; there are {sorted(known)}")
        if self.forget:
            from attractor.front import load

            numbers = list(dict.fromkeys(self.forget))
            with alone_with(self.folder):
                model = load(self.folder, device=self.device)
                for number in numbers:
                    model.forget(number)
                model.save(self.folder)
            lessons = self._read()
            print(f"forgotten: {', '.join(map(str, numbers))}")
        for lesson in lessons:
            print(
                f"{lesson['number']:4d}  {lesson['subject']}: known {lesson['known']:.0%} "
                f"(before {lesson['known_before']:.0%}), {lesson['patches']} patches, "
                f"{lesson['bytes']:,} bytes"
            )
            for prompt, answer in lesson["forms"]:
                print(f"        {prompt} {ARROW}{answer}" if prompt else f"        {answer}")
        if not lessons:
            print("no lessons: this is the base")
        return 0

    def _why_none(self) -> str:
        """Why a model that every verb takes has no lessons to list."""
        here = "`attractor teach MODEL --save FOLDER` writes some"
        if not self.folder.is_dir():
            return f"{self.folder} holds no lessons, because it is no folder: {here}"
        if has_overlays(self.folder):
            return f"{self.folder} holds overlays and no lessons: `attractor overlays {self.folder} list`"
        if any((self.folder / name).exists() for name in OWN_PATCHES):
            return (
                f"{self.folder} keeps no list: what it learns goes into patches that everything it knows "
                "shares. Lessons that can be listed and forgotten are those of a pretrained model"
            )
        return f"{self.folder} holds no lessons: {here}"

    def _read(self) -> list[dict[str, Any]]:
        shown = ("number", "subject", "known", "known_before", "patches", "bytes", "forms")
        check_hashes(self.folder)
        try:
            lessons = parse_json((self.folder / LESSONS).read_text())["lessons"]
            return [{name: lesson[name] for name in shown} for lesson in lessons]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.folder / LESSONS} cannot be read: {error}") from error


def described(lesson: "Lesson | Taught") -> str:
    """What became of a lesson, for a person."""
    verdict = "known" if lesson.known == 1 else "NOT KNOWN"
    now, before = getattr(lesson, "answered", None), getattr(lesson, "answered_before", None)
    kept = f"{lesson.patches} patches, {lesson.bytes:,} bytes, " if lesson.known == 1 else ""
    parts = [
        f"lesson {lesson.number} about {lesson.subject!r}: {verdict}",
        f"  completes {lesson.known:.0%} of {len(lesson.forms)} forms, before {lesson.known_before:.0%}",
        f"  {lesson.passes} passes, {kept}{lesson.seconds:.1f} s",
    ]
    if now is not None:
        parts.insert(2, f"  answers {now:.0%} when it is asked to finish them, before {before:.0%}")
    if lesson.known == 1 and now is not None and now < 1:
        often = "never" if now == 0 else "not always"
        parts.append(f"  it is {often} answered in other words: more forms that end with the answer may help")
    if lesson.overrides:
        parts.append(f"  it takes the place of lesson {', '.join(map(str, lesson.overrides))}")
    if lesson.known < 1:
        parts.append(
            "  nothing of it was kept; more forms of it, or a subject that all of them name, may help"
        )
    return "\n".join(parts)


def which_lessons(model: "Model", text: str) -> str:
    """The lessons that acted on a text, by number and subject."""
    if len(model.tokenizer.encode(text)) > model.model.config.context:
        return "(question and answer are too long to say which lessons acted)"
    acted = sorted({number for number in model.touching(text) if number is not None})
    if not acted:
        return "(no lesson acted: this is the base's answer, to the bit)"
    subjects = {lesson.number: lesson.subject for lesson in model.lessons()}
    return "(lessons that acted: " + ", ".join(f"{n} about {subjects[n]!r}" for n in acted) + ")"


def read_form(form: Any) -> str | tuple[str, str]:
    """A form as a person writes it: "PROMPT => ANSWER", a sentence, a pair, or {"prompt", "answer"}."""
    if isinstance(form, str):
        prompt, arrow, answer = form.partition(ARROW)
        return (prompt.strip(), " " + answer.strip()) if arrow else form
    if isinstance(form, dict) and form.keys() == {"prompt", "answer"}:
        form = [form["prompt"], form["answer"]]
    if isinstance(form, list) and len(form) == 2 and all(isinstance(part, str) for part in form):
        return (form[0], form[1])
    raise ValueError(
        f'{form!r} is no form of a lesson: give "PROMPT {ARROW} ANSWER", a sentence, ["PROMPT", " ANSWER"], '
        'or {"prompt": ..., "answer": ...}'
    )


def read_text(path: Path, subject: str | None) -> list[tuple[list[Any], str | None]]:
    """The lessons of a text: one about the subject, or one for each thing that its sentences are about."""
    found, left_out = about_each("".join(read_file(path)), subject)
    if left_out:
        why = "tell what they are about" if subject is None else f"name {subject[:SHOWN]!r}"
        print(f"{path}: sentences left out, as they do not {why}: {len(left_out)}")
    for sentence in left_out:  # quoted, so that no control character of the file reaches a terminal
        print(f"  {sentence[:SHOWN]!r}{' ...' if len(sentence) > SHOWN else ''}")
    return [(list(sentences), about) for about, sentences in found.items()]


def read_entries(path: Path) -> Iterator[Any]:
    """The entries of a JSON list, or one for each line of a .jsonl file."""
    text = "".join(read_file(path))
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _read_json(line, f"{path}, line {number}")
        return
    entries = _read_json(text, str(path))
    yield from entries if isinstance(entries, list) else [entries]


def _read_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
