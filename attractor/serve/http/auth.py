"""Keys and scopes, and the checks that replace them where only this machine is answered.

key = add_key("keys.json", ["generate", "learn"], note="the importer")    # the file keeps only its hash
KeyRing.load("keys.json").find("Bearer " + key).scopes

Every route declares with `needs` the scopes of which any opens it, or with `open_to_all` that it needs none.
A route that declares nothing is closed. Scopes are separate, and a key may have several:

- generate opens models, completions and chats
- learn opens lessons, and what they say
- admin opens rolling back and forgetting, what lessons say, and files of them
- monitor opens /ready, /metrics and the figures of the dashboard, which learn and admin open as well

/health and the files of the dashboard, which hold no data, are open.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from attractor.config import check_choice
from attractor.files import parse_json, write_file
from attractor.serve.config import is_loopback

SCOPES = ("generate", "learn", "monitor", "admin")
FIGURES = ("monitor", "learn", "admin")
"""Any of these scopes opens the figures of the server."""
SCHEMA_VERSION = 1
SHA256 = re.compile("[0-9a-f]{64}")
HOST = re.compile(r"(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]+)?")
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


# --- what routes declare


def needs(*scopes: str) -> Callable[[Endpoint], Endpoint]:
    """Declare the scopes of which any opens the route."""
    if not scopes:
        raise ValueError("needs() without a scope: name one of " + ", ".join(SCOPES) + ", or use open_to_all")
    for scope in scopes:
        check_choice("scope", scope, SCOPES)
    return lambda endpoint: _declare(endpoint, frozenset(scopes))


def open_to_all(endpoint: Endpoint) -> Endpoint:
    return _declare(endpoint, frozenset())


def _declare(endpoint: Endpoint, scopes: frozenset[str]) -> Endpoint:
    endpoint.declared_scopes = scopes  # type: ignore[attr-defined]
    return endpoint


def declared(route: object) -> frozenset[str] | None:
    """The scopes of which any opens a route: empty where it is open, None where nothing was declared."""
    return getattr(getattr(route, "endpoint", None), "declared_scopes", None)


# --- keys


@dataclass(frozen=True)
class Key:
    id: str
    sha256: str
    scopes: frozenset[str]


LOCAL = Key("local", "", frozenset(SCOPES))
"""The key of every request where there are no keys, and only this machine is answered."""


def new_key(scopes: Sequence[str], note: str = "") -> tuple[str, dict[str, Any]]:
    """A key to hand out, and its entry for a file of keys, which holds only its hash."""
    if not scopes:
        raise ValueError("a key without scopes opens nothing: name some of " + ", ".join(SCOPES))
    for scope in scopes:
        check_choice("scope", scope, SCOPES)
    name, secret = secrets.token_hex(4), f"apn-{secrets.token_urlsafe(32)}"
    entry = {"id": name, "sha256": _hash(secret), "scopes": sorted(set(scopes)), "note": note}
    return secret, entry


def add_key(path: str | Path, scopes: Sequence[str], note: str = "") -> str:
    """Make a key and add it to a file, which is created if need be. A server reads it when it starts."""
    path = Path(path)
    entries = _entries(path) if path.exists() else []
    secret, entry = new_key(scopes, note)
    content = json.dumps({"schema_version": SCHEMA_VERSION, "keys": [*entries, entry]}, indent=2) + "\n"

    def fill(partial: Path) -> None:
        partial.touch(mode=0o600)  # before there is anything in it
        partial.write_text(content, encoding="utf-8")

    write_file(path, fill)
    return secret


class KeyRing:
    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        keys = [Key(each["id"], each["sha256"], frozenset(each["scopes"])) for each in _entries(Path(path))]
        return cls(keys)

    def find(self, authorization: str | None) -> Key | None:
        """The key of an Authorization header. A wrong key takes as long as a right one."""
        kind, _, secret = (authorization or "").partition(" ")
        given = _hash(secret.strip())
        found = None
        for key in self.keys:  # all of them, always
            if hmac.compare_digest(key.sha256, given):
                found = key
        return found if kind.lower() == "bearer" else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f'expected an object with "schema_version": {SCHEMA_VERSION}')
        entries = content.get("keys")
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise ValueError('"keys" must be a list of objects')
        for each in entries:
            _check_entry(each)
        if len({each["id"] for each in entries}) < len(entries):
            raise ValueError("two keys have the same id")
        return entries
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read keys from {path}: {error}") from error


def _check_entry(entry: Mapping[str, Any]) -> None:
    name, digest, scopes = entry.get("id"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not name:
        raise ValueError('a key needs an "id"')
    if not isinstance(digest, str) or not SHA256.fullmatch(digest):
        raise ValueError(f'"sha256" of key {name!r} must be 64 hexadecimal digits')
    if not isinstance(scopes, list) or not scopes:
        raise ValueError(f'"scopes" of key {name!r} must be a list of some of {", ".join(SCOPES)}')
    for scope in scopes:
        check_choice(f"scope of key {name!r}", scope, SCOPES)


# --- without keys


def local_problem(method: str, headers: Mapping[str, str]) -> str | None:
    """The reason why a request may come from elsewhere than from this machine's user, or None.

    A page in a browser on this machine can send requests to it. The Host header shows a foreign name that
    points to this machine, and Origin and Sec-Fetch-Site show a page of another site.
    """
    host = headers.get("host", "").lower()
    name = HOST.fullmatch(host)
    if name is None or not is_loopback(name[1]):
        return "without keys this server answers only to localhost and loopback addresses"
    if method in ("GET", "HEAD"):
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        return "without keys this server takes no requests from pages of other origins"
    if site not in (None, "same-origin", "none"):
        return "without keys this server takes no requests from pages of other sites"
    return None
