"""The documentation is run, and the tree of docs/architecture.md is compared with the files."""

import doctest
import json
import re
import runpy
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from pages import PAGES, ROOT, blocks

from attractor import LessonConfig

PRETRAINED = re.compile(r'^[^#\n]*"smollm2-135m"', re.MULTILINE)
BLOCKS = [
    pytest.param(
        block.text,
        id=str(block),
        marks=[pytest.mark.slow] if PRETRAINED.search(block.text) else [],
    )
    for block in blocks("python")
    if "openai" not in block.text  # test_blocks.py has a server for it
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    if not PRETRAINED.search(block):  # that model is not fetched again
        monkeypatch.setenv("ATTRACTOR_CACHE", str(tmp_path))
    torch.manual_seed(0)
    if "transformers" in block:
        pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})


SESSIONS = [pytest.param(block.text, id=str(block)) for block in blocks("pycon")]


class Checker(doctest.OutputChecker):
    """Which quotation marks Python prints depends on words that a session leaves out."""

    def check_output(self, want, got, options):
        return super().check_output(want.replace('"', "'"), got.replace('"', "'"), options)


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
def test_sessions_print_what_they_say(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestParser().get_doctest(session, {}, "session", None, None)
    complaints = []
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS)
    assert runner.run(found, out=complaints.append).attempted > 4
    assert not complaints, "".join(complaints)


def test_usage_example_is_short():
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 10


def test_tree_is_true():
    page = ROOT / "docs" / "architecture.md"
    tree = re.search(r"## What is here\n\n```text\n(.*?)```", page.read_text(), re.DOTALL)[1]
    listed, folders = set(), []
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        path = Path(*folders)
        assert (ROOT / path).exists(), f"{path} is in {page.name} and not in the repository"
        listed.add(path)
    for pattern in ("attractor/**/*.py", "docs/*.md", "examples/*.py"):
        for file in ROOT.glob(pattern):
            assert file.relative_to(ROOT) in listed, f"{file} is missing in {page.name}"


def test_the_first_page_is_short_and_the_glossary_too():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    terms = re.findall(r"^\| (?!word|---)", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(terms) <= 20


def result(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def behind_dense(model):
    """Nats per byte that a model is behind the best dense one, on the mixture of texts."""
    losses = {
        name: statistics.mean(found["val_loss"])
        for name, found in result("match-h200")["datasets"]["mixture, bytes"].items()
    }
    return losses[model] - min(loss for name, loss in losses.items() if name.startswith("dense"))


def test_figures_of_the_first_page_follow_from_their_json():
    known = result("facts-h200")["methods"]["basins"]
    times, paper = result("tune-h200"), "d=384 tokens=16384 K=256 r=32 k=4"
    fast, dense = times["final"][paper]["today"], times["dense"][paper]
    stream = {name: row["worst"] for name, row in result("locality-h200")["rows"].items()}
    assert min(worst for name, worst in stream.items() if name.startswith("dense")) > 0.6
    figures = [
        f"{100 * known['first chunk']['mean']:.1f} %",
        f"{100 * known['first question never taught']['mean']:.1f} %",
        f"{stream['basins beside the base']:.3f}",
        f"{result('time-h200')['equal_steps']['graphs']['apn 16/256 r128']['ahead']:.3f}",
        f"{fast['forward_backward'] / dense['forward_backward']:.2f}",
        f"{behind_dense('APN, equal parameters'):.3f}",
    ]
    rows = re.findall(r"^\| .*\? \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == figures


def test_defaults_of_lessons_are_as_their_page_says():
    page = (ROOT / "docs" / "lessons.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(listed) > 5
    assert {name: str(getattr(LessonConfig(), name)) for name, _ in listed} == dict(listed)


def test_files_of_the_walks_exist():
    walks = (ROOT / "docs" / "architecture.md").read_text().split("## What is here")[0]
    files = re.findall(r"`(attractor/[\w/.]+)`", walks)
    assert files
    assert all((ROOT / file).exists() for file in files)
    lesson = walks.split("## The walk of a lesson")[1].split("\n\nA server")[0]
    assert len(set(re.findall(r"`(attractor/[\w/.]+)`", lesson))) <= 15


def test_commands_exist():
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        subprocess.run(["make", "--dry-run", command], cwd=ROOT, check=True, capture_output=True)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_layer_tour(capsys):
    runpy.run_path(str(ROOT / "examples" / "layer_tour.py"), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"loss on B ([\d.]+)", shown)]
    assert losses[-1] < 0.5 * losses[0]
    assert "changed though no token selected them: 0" in shown
