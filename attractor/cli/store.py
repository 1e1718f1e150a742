"""attractor keys|store: what surrounds a server, without the model that it serves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attractor.cli.common import otherwise


@dataclass(kw_only=True)
class Keys:
    """Make a key for a server; it is shown once, and the file keeps only its hash."""

    file: tyro.conf.Positional[Path]
    """The file with the hashes of keys; it is made if it is not there."""
    scopes: tuple[Literal["generate", "learn", "monitor", "admin"], ...]
    """What the key is for: to ask, to teach, to watch, to take lessons back."""
    note: Annotated[str, otherwise("none", "TEXT")] = ""
    """A name for the holder of the key."""

    def run(self) -> int:
        try:
            from attractor.serve.http.auth import add_key
        except ImportError as error:
            from attractor.cli.serve import EXTRA

            raise ValueError(EXTRA.format(error)) from error
        print(add_key(self.file, self.scopes, self.note))
        return 0


@dataclass(kw_only=True)
class StoreCommand:
    """Look at what a server keeps, also while it is running; nothing is changed.

    verify checks every byte, show lists what was learned as lines of JSON, backup copies it to a new folder.
    """

    action: tyro.conf.Positional[Literal["verify", "show", "backup"]]
    """What to do with the store."""
    data_dir: tyro.conf.Positional[Path]
    """The --store of a server: the folder with lessons.db."""
    to: Annotated[Path | None, otherwise("none, which a backup needs", "PATH")] = None
    """The new folder of a backup; it can be a --store itself."""

    def run(self) -> int:
        from attractor.serve import store

        if (self.to is None) == (self.action == "backup"):
            raise ValueError("--to names the new folder of a backup, and is for nothing else")
        if self.action == "show":
            for line in store.show(self.data_dir):
                print(json.dumps(line))
            return 0
        if self.to is not None:
            print(f"version {store.backup(self.data_dir, self.to).last} is in {self.to}, and was verified")
            return 0
        report = store.verify(self.data_dir)
        print(f"versions {report.oldest} to {report.last} can be had")
        print(f"snapshots: {', '.join(map(str, report.snapshots)) or 'none'}")
        if report.erased:
            print(f"erased: {', '.join(report.erased)}")
        for damage in report.damage:
            print(f"damaged: {damage}")
        if not report.damage:
            print("everything is as it was written")
        return 1 if report.damage else 0
