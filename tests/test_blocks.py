"""Every block of the documentation that is not Python: its commands are run, or parsed by what they start.

Python is run by test_readme.py, which also compares the tree of docs/architecture.md with the files. A block
that nothing here knows fails.
"""

import configparser
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block, blocks, words

LANGUAGES = {"", "python", "pycon", "text", "json", "nginx", "ini"}
TAUGHT = ["serving.md:1", "serve.md:2"]
"""Blocks with curl that teach lessons, each from the first one on."""
SHELL = list(blocks(""))
COMMANDS = [
    pytest.param(command, id=f"{block} {' '.join(words(command))[:60]}")
    for block in SHELL
    for command in block.commands()
]


def block(name: str) -> Block:
    (found,) = (each for each in blocks() if str(each) == name)
    return found


def only(language: str) -> Block:
    (found,) = blocks(language)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


# --- commands


def test_every_language_is_known() -> None:
    assert {each.language for each in blocks()} == LANGUAGES
    assert {str(each) for each in blocks("text")} == {"architecture.md:1", "training.md:2"}


def attractor(given: list[str], capsys: Any) -> None:
    pytest.importorskip("tyro", reason="tyro is not installed: the extra cli")
    from attractor.cli import main, parse

    if given[-1] == "--help":
        with contextlib.suppress(SystemExit):
            assert main(given) == 0
        assert "--" in capsys.readouterr().out
    elif given[0].startswith("--tyro"):
        with contextlib.suppress(SystemExit):
            parse(given[: given.index(">")])
        assert "attractor" in capsys.readouterr().out
    else:
        assert hasattr(parse(given), "run")  # a mistake would end the program


def studies(given: list[str]) -> None:
    pytest.importorskip("tyro", reason="tyro is not installed: the extra cli")
    import tyro

    from studies.__main__ import _commands

    tyro.cli(_commands(), args=given)


def torchrun(given: list[str], capsys: Any) -> None:
    from torch.distributed.run import parse_args

    options = parse_args(given)
    assert options.module
    assert options.training_script == "attractor.cli"
    attractor(options.training_script_args, capsys)


def pip(given: list[str]) -> None:
    assert given[:3] == ["install", "-c", "constraints.txt"]
    (extras,) = re.fullmatch(r"\.\[([\w,]+)\]", given[3]).groups()  # type: ignore[union-attr]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def pytest_command(given: list[str]) -> None:
    file = ROOT / given[0]
    assert file.is_file()
    if "-k" in given:
        assert re.search(rf"def test_\w*{given[given.index('-k') + 1]}", file.read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_as_they_are_taken(command: str, capsys: Any) -> None:
    subprocess.run(["sh", "-n"], input=command, text=True, check=True)
    match words(command):
        case ["attractor", *given]:
            attractor(given, capsys)
        case ["python", "-m", "studies", *given]:
            studies(given)
        case ["torchrun", *given]:
            torchrun(given, capsys)
        case ["make", target]:
            subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
        case ["pip", *given]:
            pip(given)
        case [".venv/bin/python", "-m", "pytest", *given]:
            pytest_command(given)
        case ["curl" | "sqlite3", *_]:
            pass  # run below
        case ["python3", "-m", "venv", ".venv", "&&", "source", ".venv/bin/activate"]:
            pass  # the Makefile does the same
        case ["OMP_WAIT_POLICY=PASSIVE", "python", "my_program.py"]:
            pass  # a program of the reader's
        case other:
            pytest.fail(f"nothing checks {other}")


# --- several processes

SMALL = (
    "--data my.txt --device cpu --model.context 16 --model.dim 16 --model.num-layers 1 --model.num-heads 2 "
    "--model.apn.num-patches 4 --model.apn.rank 2 --train.batch-size 4 --train.accumulation 1 "
    "--train.max-steps 4 --train.warmup-steps 1 --train.eval-interval 4 --train.compile False"
)
RUNS = [command for each in SHELL for command in each.commands() if command.startswith("torchrun ")]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("command", RUNS, ids=range(len(RUNS)))
def test_torchrun_runs(command: str, tmp_path: Path) -> None:
    """With two processes of a small model. Two machines are two folders here."""
    machines = 2 if "--nnodes 2" in command else 1
    real = command.replace("--nproc-per-node 8", f"--nproc-per-node {2 // machines}")
    real = real.replace("first-machine:29500", f"127.0.0.1:{free_port()}")
    given = words(real)[1:] + SMALL.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = []
    for number in range(machines):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "my.txt").write_text("to be or not to be, that is the question\n" * 200)
        with (folder / "log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *given],
                    cwd=folder, env=environment, stdout=log, stderr=log,
                )
            )  # fmt: skip
    try:
        ended = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait()
    assert ended == [0] * machines, "".join((tmp_path / str(n) / "log").read_text() for n in range(machines))
    (trained,) = tmp_path.glob("*/runs/paper_apn/checkpoints/last-00000004")
    assert json.loads((trained / "training.json").read_text())["step"] == 4


# --- a server, and what its clients do


def need(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: the extra dev")


@contextlib.contextmanager
def running(service: Any, **settings: Any) -> Iterator[int]:
    """A service on a port of this machine."""
    from serving import Running

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app

    given = ServeSettings(**settings)
    with Running(create_app(service, given), given) as at:
        yield at.port


def curl(block: Block, port: int, folder: Path) -> str:
    """Run the lines of a block that are curl's, as they are but for the port; a refusal ends it."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    lines = [command for command in block.commands() if command.startswith("curl ")]
    assert lines
    (folder / ".curlrc").write_text("fail-with-body\nshow-error\n")
    script = "".join(lines).replace("localhost:8000", f"127.0.0.1:{port}")
    environment = {**os.environ, "CURL_HOME": str(folder)}
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_with_curl_is_run() -> None:
    with_curl = {str(each) for each in SHELL if any(line.startswith("curl ") for line in each.commands())}
    assert with_curl == {*TAUGHT, "serving.md:2", "serving.md:5"}


def replies(said: str) -> Iterator[Any]:
    """JSON after JSON."""
    while said := said.strip():
        found, end = json.JSONDecoder().raw_decode(said)
        yield found
        said = said[end:]


@pytest.mark.parametrize("name", TAUGHT)
def test_curl_teaches_asks_and_forgets(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    need("uvicorn", "transformers")
    from taught import serve

    monkeypatch.setattr("attractor.serve.learning.canaries.PROMPTS", ("Hello",))
    with serve(tmp_path / "store", name="smollm2-135m") as service, running(service) as port:
        learn = service.teacher.learn  # so small a model does not come to know it
        service.teacher.learn = lambda *given, **options: learn(*given, **{**options, "require_known": False})
        learned, answer, gone = replies(curl(block(name), port, tmp_path))
    assert learned["lessons"][0]["subject"] == "Zorvan Quillbeam"
    assert answer["choices"][0]["attractor"]["version"] == learned["now"]
    assert gone["lessons"] == [0]


def test_curl_asks(tmp_path: Path) -> None:
    need("uvicorn")
    from fake_service import FakeService

    with running(FakeService()) as port:
        said = curl(block("serving.md:2"), port, tmp_path)
    models, end = json.JSONDecoder().raw_decode(said)
    completion, _ = json.JSONDecoder().raw_decode(said[end:])
    assert models["data"][0]["id"] == "fake"
    assert completion["choices"][0]["text"] == "Now is the winter of"
    assert said.endswith("data: [DONE]\n\n")


def test_texts_by_curl_and_by_openai(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """And what SQLite says of the store afterwards."""
    need("uvicorn", "openai")
    from served import serve

    with serve(tmp_path / "RUN-served", name="tiny_apn") as service, running(service) as port:
        learned, completion, versions, gone, back = replies(curl(block("serving.md:5"), port, tmp_path))
        assert (learned["source"], versions["data"][0]["version"]) == ("play", learned["version"])
        assert completion["choices"][0]["text"]
        assert back["to"] == 0
        assert gone["source"] == "play"
        (written,) = (each for each in blocks("python") if "openai" in each.text)
        exec(written.text.replace(":8000", f":{port}"), {})
        assert capsys.readouterr().out
    (asked,) = block("serving.md:8").commands()
    program, *given = words(asked)
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    said = subprocess.run([program, *given], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith("play|1|")


def test_what_compare_prints_has_this_form() -> None:
    pytest.importorskip("tyro", reason="tyro is not installed: the extra cli")
    from attractor.cli.train import table

    (shown,) = (each.text.splitlines() for each in blocks("text") if each.page == "training.md")
    keys = ("parameters", "active_parameters", "multiply_adds_per_token", "val_loss", "val_ppl",
            "step_milliseconds", "training_seconds")  # fmt: skip
    columns = zip(
        *([float(x.replace(",", "")) for x in line.split()[-3:-1]] for line in shown[1:]), strict=True
    )
    result = {
        name: dict(zip(keys, own, strict=True)) for name, own in zip(("dense", "APN"), columns, strict=True)
    }
    ratio = slice(None, -5)  # of figures that were not rounded
    assert [line[ratio] for line in table(result).splitlines()] == [line[ratio] for line in shown]


def test_what_a_reply_says_of_lessons_has_these_fields() -> None:
    need("uvicorn")
    from fake_service import school
    from starlette.testclient import TestClient

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app

    client = TestClient(create_app(school(), ServeSettings()), base_url="http://127.0.0.1")
    reply = client.post("/v1/completions", json={"prompt": "Where is Zorvan Quillbeam?"})
    shown = json.loads("{" + only("json").text + "}")["attractor"]
    given = reply.json()["choices"][0]["attractor"]
    assert shown.keys() == given.keys()
    assert shown["lessons"][0].keys() == given["lessons"][0].keys()
    assert shown["lessons"][0]["tokens"][0].keys() == given["lessons"][0]["tokens"][0].keys()


def test_a_unit_of_systemd_starts_what_there_is(tmp_path: Path, capsys: Any) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(only("ini").text.replace("\\\n ", " "))
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, *given = words(unit["Service"]["ExecStart"])
    assert Path(program).name == "attractor"
    attractor(given, capsys)
    if shutil.which("systemd-analyze"):
        place = tmp_path / "attractor.service"
        place.write_text(only("ini").text.replace(program, sys.executable))
        said = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert "Unknown" not in said.stderr


# --- several servers behind nginx


@contextlib.contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[str]:
    """The block as it is but for its ports, in the least that nginx wants around it."""
    program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        pytest.skip("there is no nginx here")
    port, text = free_port(), only("nginx").text
    for written, real in zip((8000, 8001, 8002), (port, *ports), strict=True):
        assert text.count(f"127.0.0.1:{written};") == 1
        text = text.replace(f"127.0.0.1:{written};", f"127.0.0.1:{real};")
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    beside = f"daemon off; master_process off; pid {folder}/pid; events {{}}\n"
    (folder / "nginx.conf").write_text(f"{beside}http {{\naccess_log off;\n{places}{text}}}\n")
    command = [program, "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf"]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    assert "[warn]" not in tried.stderr
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                assert process.poll() is None
                with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_nginx_in_front_of_two_servers(tmp_path: Path) -> None:
    """Both are asked, streams are passed on while they are written, and one goes on where the other ends."""
    need("uvicorn", "httpx")
    import httpx
    from fake_service import FakeService

    from attractor.serve.http.auth import add_key

    keys = tmp_path / "keys.json"
    key = {"Authorization": f"Bearer {add_key(keys, ['generate', 'learn'])}"}
    one, other = FakeService(), FakeService()
    asked = {"model": "fake", "prompt": "Once", "max_tokens": 3}
    with contextlib.ExitStack() as first, running(other, keys=keys) as second_port:
        first_port = first.enter_context(running(one, keys=keys))
        with nginx(tmp_path, [first_port, second_port]) as base, httpx.Client(base_url=base) as client:
            assert client.post("/v1/completions", json=asked).status_code == 401
            for _ in range(6):
                assert client.post("/v1/completions", json=asked, headers=key).status_code == 200
            assert one.jobs
            assert other.jobs

            one.delay = other.delay = 0.1
            before = len(one.tickets), len(other.tickets)
            body = asked | {"stream": True, "max_tokens": 60}
            with client.stream("POST", "/v1/completions", json=body, headers=key) as reply:
                next(reply.iter_lines())
                (ticket,) = one.tickets[before[0] :] + other.tickets[before[1] :]
                assert ticket.finish is None

            large = json.dumps({"text": "to be", "source": "play"}) + " " * (2 << 20)
            told = client.post(
                "/v1/learn", content=large, headers={**key, "Content-Type": "application/json"}
            )
            assert told.status_code == 200, told.text

            first.close()
            one.delay = other.delay = 0.0
            for _ in range(4):
                assert client.post("/v1/completions", json=asked, headers=key).status_code == 200
