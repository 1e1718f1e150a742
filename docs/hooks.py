"""What the site needs beside the pages: files of other folders, generated texts, and a check of links."""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md"} | {
    f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "LOG", "SECURITY")
}
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")

WITH_EQUATIONS = ("math.md", "bounded-forgetting.md")
NO_EQUATION = re.compile(
    r"(?P<kept>```.*?```|`[^`]*`|\]\([^)]*\)|^ {4}.*?$)|[^`\]\n]+|.", re.MULTILINE | re.DOTALL
)
SCRIPT = re.compile(r"(?<=\S)([_^])(\{(?:[^{}]|\{[^{}]*\})*\}|<t|[A-Za-z0-9]+)")


def place(path: str) -> str:
    """Where a file of the repository is in the site."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")


def targets(page: str, text: str) -> Iterator[str]:
    """The files of the repository that a page of it links to."""
    for link in LINK.findall(text):
        yield os.path.normpath(os.path.join(os.path.dirname(page), link))


def on_files(files: Files, config: Any) -> Files:
    source = {file.src_uri: f"docs/{file.src_uri}" for file in files if file.is_documentation_page()}
    source |= {site: page for page, site in PAGES.items()}
    wanted = {t for page in source.values() for t in targets(page, (ROOT / page).read_text())}
    for path in {
        *PAGES,
        *(path for path in wanted if (ROOT / path).is_file() and not path.startswith("docs/")),
    }:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    icon = ROOT / "attractor/serve/dashboard/icon.svg"
    files.append(File.generated(config, "icon.svg", abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages of the site."""
    site = page.file.src_uri
    here = next((path for path, uri in PAGES.items() if uri == site), f"docs/{site}")

    def moved(link: re.Match[str]) -> str:
        (target,) = targets(here, f"]({link[0]})")
        found = (ROOT / target).is_file()
        return os.path.relpath(place(target), os.path.dirname(site) or ".") if found else link[0]

    if site in WITH_EQUATIONS:
        markdown = NO_EQUATION.sub(lambda part: part["kept"] or scripts(part[0]), markdown)
    markdown = re.sub("<!-- (command_line|http) -->", lambda mark: GENERATED[mark[1]](), markdown)
    return LINK.sub(moved, markdown)


def scripts(text: str) -> str:
    """Equations are plain text with x_i and x^{2}: make them subscripts and superscripts."""
    tag = {"_": "sub", "^": "sup"}

    def raised(found: re.Match[str]) -> str:
        inner = scripts(found[2].removeprefix("{").removesuffix("}")).replace("<t", "&lt;t")
        return f"<{tag[found[1]]}>{inner}</{tag[found[1]]}>"

    return SCRIPT.sub(raised, text)


# --- pages that are generated


def command_line() -> str:
    """Every verb as its parser describes it."""
    from attractor.cli import GROUPS, main

    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}

    def shown(*arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).strip()

    lines: list[str] = []
    for title, verbs in GROUPS.items():
        lines += ["", f"## {title}"]
        for name, verb in verbs.items():
            command = verb.command()
            inner = list(command) if isinstance(command, dict) else []
            lines += ["", f"### attractor {name}", "", "```text", shown(name), "```"]
            if inner:
                first = "tiny_apn" if "tiny_apn" in inner else inner[0]
                lines += ["", f"`attractor {name} {first}`:", "", "```text", shown(name, first), "```"]
    return "\n".join(lines) + "\n"


def http() -> str:
    """The routes as the OpenAPI documents of the two kinds of server describe them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fake_service import FakeSchool, FakeService

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app
    from attractor.serve.http.auth import declared

    routes: dict[str, dict[tuple[str, str], str]] = {}
    schemas: dict[str, Any] = {}
    for kind in (FakeSchool, FakeService):
        app = create_app(kind(), ServeSettings())
        api = app.openapi()
        schemas |= api["components"]["schemas"]
        scopes = {
            (route.path_format, method.lower()): declared(route)
            for route in app.routes
            for method in getattr(route, "methods", ())
        }
        routes[kind.teaches] = {
            (path, method): told(path, method, about, scopes[path, method])
            for path, methods in api["paths"].items()
            for method, about in methods.items()
        }
    lessons, texts = routes["lessons"], routes["texts"]
    parts = {
        "Every server": [text for key, text in lessons.items() if texts.get(key) == text],
        "A server that is taught lessons": [text for key, text in lessons.items() if texts.get(key) != text],
        "A server that learns texts": [text for key, text in texts.items() if lessons.get(key) != text],
        "What is sent": [f"### {name}\n\n{fields(schema)}" for name, schema in sorted(schemas.items())],
    }
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(part) for title, part in parts.items())


def told(path: str, method: str, about: dict[str, Any], scopes: frozenset[str] | None) -> str:
    lines = [f"### {method.upper()} {path}", about.get("description", about["summary"] + ".")]
    if scopes:
        lines.append("A key needs the scope " + " or ".join(f"`{scope}`" for scope in sorted(scopes)) + ".")
    for media, body in about.get("requestBody", {}).get("content", {}).items():
        lines.append(f"Body: {shape(body.get('schema', {}))}, as `{media}`.")
    if given := about.get("parameters"):
        rows = {one["name"]: one["schema"] | {k: one[k] for k in one if k == "description"} for one in given}
        required = [one["name"] for one in given if one.get("required")]
        lines.append(fields({"properties": rows, "required": required}))
    replies = [
        code
        if code[0] > "2" or reply["description"] == "Successful Response"
        else f"{code} ({reply['description']})"
        for code, reply in sorted(about["responses"].items())
    ]
    return "\n\n".join([*lines, f"Replies: {', '.join(replies)}."])


def fields(schema: dict[str, Any]) -> str:
    """A table of the properties of an object."""
    rows = ["| name | type | default | |", "|---|---|---|---|"]
    for name, part in schema.get("properties", {}).items():
        default = "required" if name in schema.get("required", ()) else f"`{json.dumps(part.get('default'))}`"
        rows.append(f"| `{name}` | {shape(part)} | {default} | {part.get('description', '')} |")
    return schema.get("description", "") + "\n\n" + "\n".join(rows)


def shape(schema: dict[str, Any]) -> str:
    """The type of a value in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return " or ".join(f"`{json.dumps(value)}`" for value in choices)
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(shape(part) for part in parts))
    if schema.get("type") == "array":
        return "list of " + shape(schema["items"]) if "items" in schema else "list"
    names = {
        "minimum": "at least",
        "maximum": "at most",
        "minLength": "length at least",
        "maxLength": "length at most",
    }
    limits = [f"{word} {schema[key]}" for key, word in names.items() if key in schema]
    return ", ".join([schema.get("type", "anything"), *limits])


class Examples(griffe.Extension):
    """Examples in docstrings become blocks of code: Markdown would take their prompts for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            plain = obj.docstring.value.replace("  # doctest: +SKIP", "")
            obj.docstring.value = EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", plain)


GENERATED = {"command_line": command_line, "http": http}
"""What a page has in place of a comment."""


# --- what is checked at the end


class Page(HTMLParser):
    """What a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given.get("id", ""), given.get("name", "")} - {""}
        if "src" in given or (tag == "link" and given.get("rel") != "canonical"):
            self.loaded.add(given.get("src") or given["href"])
        elif "href" in given:
            self.links.add(given["href"])


def on_post_build(config: Any) -> None:
    """Every link leads somewhere in the site, and no page loads anything from elsewhere."""
    site = Path(config["site_dir"])
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                faults += [f"{path}: loads {link}"] * (link in page.loaded and parts.scheme != "data")
                continue
            near = site if parts.path.startswith("/") else path.parent
            target = (near / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target /= "index.html" if target.is_dir() else ""
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                faults.append(f"{path}: dead link {link}")
    for style in site.rglob("*.css"):
        faults += [
            f"{style}: loads {url}" for url in re.findall(r"url\([\"']?(https?:[^)]*)", style.read_text())
        ]
    if faults:
        raise PluginError("\n".join(sorted(faults)))
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links: none is dead")
