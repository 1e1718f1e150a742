"""The examples that people copy are run as they are."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name, *arguments, monkeypatch, capsys):
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_own_transformer(monkeypatch, capsys):
    assert "to be, that is the question" in run("own_transformer", monkeypatch=monkeypatch, capsys=capsys)


def test_vision_block(monkeypatch, capsys):
    shown = run("vision_block", monkeypatch=monkeypatch, capsys=capsys)
    assert int(re.search(r"(\d+)% of 512", shown)[1]) > 80  # by chance it is 25


@pytest.mark.parametrize("name", ["with_trainer", "with_accelerate"])
def test_with_hugging_face(name, monkeypatch, capsys, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")
    monkeypatch.chdir(tmp_path)
    shown = run(name, monkeypatch=monkeypatch, capsys=capsys)
    if name == "with_trainer":
        first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", shown).groups())
    else:
        first, *_, last = map(float, re.findall(r"loss ([\d.]+)", shown))
    assert last < 0.6 * first
    assert not list(tmp_path.iterdir())


def test_client(monkeypatch, capsys):
    for package in ("openai", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} is not installed: the extra dev")
    from fake_service import FakeService
    from serving import Running

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app

    with Running(create_app(FakeService(), ServeSettings()), ServeSettings()) as running:
        base = f"http://127.0.0.1:{running.port}"
        shown = run("client", "Who?", "--base", base, monkeypatch=monkeypatch, capsys=capsys)
        assert shown == "".join(
            f"{way}: Now is the winter of our disco\n" for way in ("with_openai", "with_urllib")
        )
