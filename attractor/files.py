"""Files and folders that appear whole or not at all, and JSON that every reader understands.

What is written lies under another name first, is flushed to the disk and then renamed: a kill at any moment
leaves what was there before, or what is new. A saved folder says in hashes.json what its files are, so that
one that was damaged or mixed up is refused.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import Tensor


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Call `fill` with the name of a file to write, flush it, and make it appear as `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}-{os.getpid()}")
    try:
        fill(partial)
        flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors; a full disk is an OSError, as it is for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path.name} in {path.parent}: {error}") from error


STORE = "lessons.db"
"""The database of a server's store: a folder that has it is never replaced."""
HASHES = "hashes.json"
"""Beside saved files: name -> SHA-256. It is no signature, and may be deleted where a change was meant."""


def check_hashes(folder: Path, *names: str) -> None:
    """A ValueError if a file of a saved folder is not what was saved, any that is listed or one of `names`.

    Folders of earlier releases, which list nothing, pass.
    """
    listed = _listed(folder)
    for name in names or listed:
        if name in listed and sha256_of(folder / name) != listed[name]:
            raise ValueError(
                f"{folder / name} is not what was saved: its hash differs. Take a copy that is whole; if it "
                f"was changed on purpose, delete {folder / HASHES}"
            )


@contextmanager
def hashing(folder: Path, *names: str) -> Iterator[None]:
    """Around the writing of these files: a kill meanwhile leaves them unlisted, as an earlier release did."""
    kept = {name: value for name, value in _listed(folder).items() if name not in names}
    if (folder / HASHES).exists():
        write_text(folder / HASHES, json.dumps(kept, indent=1))
    yield
    found = {name: sha256_of(folder / name) for name in names}
    write_text(folder / HASHES, json.dumps(kept | found, indent=1))


def _listed(folder: Path) -> dict[str, str]:
    try:
        listed = parse_json((folder / HASHES).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / HASHES} is damaged: {error}") from error
    if not isinstance(listed, dict) or any(Path(name).is_absolute() or ".." in name for name in listed):
        raise ValueError(f"{folder / HASHES} is damaged: it lists no files of this folder")
    return listed


def sha256_of(path: Path) -> str:
    """The hash of a file; one that is not there has none that could be right."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError):
        return "missing"


def digest_of(fields: Mapping[str, Any]) -> str:
    """The hash of what JSON can hold, in whatever order it is."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def check_replaceable(target: Path) -> None:
    """An error where a folder holds what a server was taught: to replace it would delete that."""
    if (target / STORE).exists():
        raise ValueError(f"{target} is a server's store ({STORE} is in it): choose another folder")


def write_folder(target: Path, fill: Callable[[Path], None], *, hashed: bool = True) -> None:
    """Call `fill` with an empty folder, flush what it wrote, and make it appear as `target`.

    If `hashed`, it lists the hashes of its files but those for people, for `check_hashes`.
    """
    check_replaceable(target)
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        if hashed:
            (partial / HASHES).unlink(missing_ok=True)  # of what `fill` wrote first
            found = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.suffix != ".md"]
            with hashing(partial, *(path.relative_to(partial).as_posix() for path in found)):
                pass
        replace_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_folder(partial: Path, target: Path) -> None:
    """Flush a folder and its files, and make it appear as `target`; what was there goes only then."""
    recover_folder(target)
    check_replaceable(target)
    for path in [*partial.iterdir(), partial]:
        flush(path)
    replaced = _replaced(target)
    if target.exists():  # it comes back, should we be killed before the next line is done
        os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    if replaced.exists():
        remove_folder(replaced)
    flush(target.parent)


def recover_folder(target: Path) -> None:
    """Undo a replacement that a kill cut short: the old folder comes back, or what is left of it goes."""
    replaced = _replaced(target)
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)
    elif replaced.exists():
        remove_folder(replaced)


@contextmanager
def alone_with(folder: Path) -> Iterator[None]:
    """Around reading, changing and writing a folder: a ValueError if another process is doing so.

    On Windows, which has no such locks, nothing is checked.
    """
    if fcntl is None:
        yield
        return
    path = folder.parent / f".{folder.name}.lock"
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
                break
        except BlockingIOError:
            os.close(handle)
            raise ValueError(
                f"another command is changing {folder}: wait for it, or choose another folder"
            ) from None
        os.close(handle)  # it was removed by who had it before
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def remove_folder(folder: Path) -> None:
    """Rename, then delete: a kill in between never leaves half a folder under its real name."""
    doomed = folder.with_name(f".partial-removed-{folder.name}-{os.getpid()}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _replaced(target: Path) -> Path:
    return target.with_name(f".replaced-{target.name}")


def flush(path: Path) -> None:
    """Have a file or a folder on the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite(values: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: None where a number is not one."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def parse_json(text: str | bytes) -> Any:
    """Read JSON. Every error is a ValueError, also that of text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_jsonl(path: Path, counter: str, until: float = math.inf) -> list[dict[str, Any]]:
    """The records of a log whose `counter` is a whole number, `until` at most; none where there is no file.

    So without lines that a kill cut short or that another program wrote, and where a run goes on from a
    checkpoint, without the future that did not happen.
    """
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get(counter), int) and record[counter] <= until:
            records.append(record)
    return records
