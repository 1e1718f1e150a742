"""`attractor serve` as a process of its own: how it ends, and what it says when it cannot begin."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from served import FOX, serve

from attractor import cli
from attractor.cli.serve import Serve
from attractor.files import write_folder
from attractor.serve.decode.engine import Job
from attractor.serve.errors import StoreDamaged
from attractor.serve.http.auth import add_key
from attractor.serve.store import Store, check_folder, verify

FAST = shlex.split(
    "--model.context 8 --model.num-layers 1 --model.num-heads 2 --model.dim 16 --model.apn.num-patches 4 "
    "--model.apn.rank 4 --train.max-steps 2 --train.batch-size 2 --train.warmup-steps 1 --device cpu"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(["to", "be", "or", "not"], k=500)))
    out = folder / "run"
    assert cli.main(["train", "tiny_apn", "--data", str(text), "--out", str(out), *FAST]) == 0
    return out


def ask(port: int, path: str, **body: object) -> bytes:
    with opened(port, path, **body) as reply:
        return bytes(reply.read())


def opened(port: int, path: str, **body: object) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=300)


def test_what_learns_texts_cannot_share_its_store(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--shared is for servers that are taught lessons"):
        Serve(model=str(run), shared=True, device="cpu").open(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_politely(run: Path, tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "attractor.cli", "serve", str(run), "--learn", "--store", str(data)]
    command += ["--port", "0", "--limits.drain", "0.3", "--device", "cpu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            port = announced(process)
            ask(port, "/v1/learn", text="to be or not to be", source="play")
            form = {"model": "run", "prompt": "to", "max_tokens": 4096, "stream": True}
            texts = [opened(port, "/v1/completions", **form) for _ in range(8)]
            process.send_signal(number)
            ends = [text.read().decode().rstrip().splitlines()[-1] for text in texts]
            told = process.communicate(timeout=300)[0]
        finally:
            process.kill()
    assert process.returncode == 0
    assert ends == ["data: [DONE]"] * 8
    assert "Traceback" not in told
    assert f"version 1 is in {data}" in told
    assert not (data / "lessons.db-wal").exists()  # it was closed, and not left
    assert verify(data).last == 1


def announced(process: "subprocess.Popen[str]") -> int:
    """The port that a server says it can be asked at."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"http://127\.0\.0\.1:(\d+)/ is the dashboard", line):
            return int(found[1])
    raise AssertionError("it ended without a word")


def test_what_cannot_be_served_is_told_before_it_is_announced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("{")
    serve = ["serve", str(run), "--store", str(tmp_path / "data"), "--device", "cpu"]
    assert cli.main([*serve, "--keys", str(keys)]) == 1
    told = capsys.readouterr()
    assert "cannot read keys from" in told.err
    assert "dashboard" not in told.out
    assert cli.main([*serve, "--port", "99999"]) == 1
    assert "port=99999 must be" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setattr(
            "attractor.serve.http.app.check_address", lambda settings: None
        )  # it was free then
        assert cli.main([*serve, "--port", port]) == 1
        assert "made anew" not in capsys.readouterr().out
        (tmp_path / "data" / "snapshots.db").write_bytes(b"damaged" * 1000)  # is told, whatever happens next
        assert cli.main([*serve, "--port", port]) == 1
    told = capsys.readouterr()
    assert "snapshots were damaged, and are made anew" in told.out
    assert "address already in use" in told.err
    assert f"the server cannot start on 127.0.0.1, port {port}" in told.err
    assert "dashboard" not in told.out


def test_what_cannot_be_served_is_told_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading one, and measuring background for it, may take minutes."""
    monkeypatch.setattr(Serve, "_load", lambda self: pytest.fail("it was loaded"))
    keys, file, data = tmp_path / "keys.json", tmp_path / "file", tmp_path / "data"
    keys.write_text("{")
    file.touch()
    (tmp_path / "old" / "journal").mkdir(parents=True)

    def problem(**options: object) -> str:
        given = [f"--{name}={value}" for name, value in {"store": data, "port": 0, **options}.items()]
        assert cli.main(["serve", "smollm2-135m", *given]) == 1
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = problem(port=port)
    assert f"the server cannot start on 127.0.0.1, port {port}: Address already in use" in told
    assert "cannot start on" in problem(host="192.0.2.1", keys=some_keys(tmp_path))  # of no machine
    assert "cannot read keys from" in problem(keys=keys)
    for bad in (file, file / "data"):
        assert f"--store {bad} cannot be used: Not a directory" in problem(store=bad)
    bad = Path("/proc/nowhere/data")
    assert f"--store {bad} cannot be used: " in problem(store=bad)
    assert "versions before 0.2.0 wrote" in problem(store=tmp_path / "old")
    with serve(data):
        told = problem()
    assert f"--store {data} cannot be used: {data} is open already" in told


def test_a_store_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Who saves lessons replaces the whole folder: what a server keeps there would go with it."""
    saved = tmp_path / "school"
    write_folder(saved, lambda folder: (folder / "lessons.json").write_text("{}"))
    for attempt in (check_folder, lambda folder: Store.open(folder, identity="x").close()):
        with pytest.raises(ValueError, match=r"holds hashes.json, lessons.json, and a store needs a folder"):
            attempt(saved)
    served = tmp_path / "served"
    Store.open(served, identity="x").close()
    kept = sorted(path.name for path in served.iterdir())
    with pytest.raises(ValueError, match=r"a server.s store \(lessons.db is in it\): choose another"):
        write_folder(served, lambda folder: (folder / "lessons.json").write_text("{}"))
    assert sorted(path.name for path in served.iterdir()) == kept
    (served / "notes.txt").write_text("of somebody")  # there is a store, and it stays one
    Store.open(served, identity="x").close()


def test_looking_at_a_folder_leaves_nothing_there(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    check_folder(tmp_path / "a")
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a").iterdir()) == []


def some_keys(folder: Path) -> Path:
    add_key(folder / "good.json", ["generate"])
    return folder / "good.json"


def test_what_the_guard_learned_is_served(run: Path, tmp_path: Path) -> None:
    from attractor.cli.serve import Serve, store_overlays
    from attractor.front import load
    from attractor.serve.learning.canaries import Rules
    from attractor.serve.service import Service

    text, out = tmp_path / "new.txt", tmp_path / "adapted"
    text.write_text("not to not to be " * 40)
    assert (
        cli.main(["adapt", str(run), "--data", str(text), "--out", str(out), "--guard", "--device", "cpu"])
        == 0
    )
    prompt, most = "not to", 12
    expected = load(out, device="cpu").generate(prompt, max_tokens=most)
    for _ in range(2):  # a second start finds the overlays in the store
        serve = Serve(model=str(out), device="cpu", rules=Rules(canary_tokens=16))
        learner = serve._learner(serve._load())
        store_overlays(learner, tmp_path / "store")
        with Service.open(learner, tmp_path / "store", rules=serve.rules, learning=False) as service:
            assert service.version == 1
            assert service.paths() == ["base", "new"]
            tokens = learner.tokenizer.encode(prompt).tolist()
            written = list(service.submit(Job(prompt=tokens, max_tokens=most, temperature=0.0)))
        assert learner.tokenizer.decode([piece.token for piece in written]) == expected
    with pytest.raises(ValueError, match="settings of its own; leave yours out"):
        Serve(model=str(out), prior=0.4, device="cpu").open(tmp_path / "another")


def test_verify_show_and_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with serve(data) as service:
        service.learn([FOX], "fox", "k1")
        service.learn([FOX], "law")
        service.forget("law", erase=True)
        assert cli.main(["store", "verify", str(data)]) == 0  # while it is open
    told = capsys.readouterr().out
    assert "versions 0 to 3 can be had" in told
    assert "erased: law" in told
    assert "everything is as it was written" in told
    assert cli.main(["store", "show", str(data)]) == 0
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["kind"], first["source"], first["key"]) == ("lesson", "fox", "k1")
    assert first["bytes"] > 1000
    assert "bytes" not in second
    assert third["kind"] == "erase"
    assert cli.main(["store", "backup", str(data), "--to", str(copy)]) == 0
    assert f"version 3 is in {copy}, and was verified" in capsys.readouterr().out
    with serve(copy) as service:
        assert (service.version, service.paths()) == (3, ["base", "fox"])
    for wrong in (["backup", str(data)], ["verify", str(data), "--to", str(copy)]):
        assert cli.main(["store", *wrong]) == 1
        assert "--to names the new folder" in capsys.readouterr().err


def test_damage_is_named_and_the_exit_status_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the last record: it was acknowledged, and is not taken for one that was being written."""
    with serve(tmp_path) as service:
        service.learn([FOX], "fox")
    path = tmp_path / "lessons.db"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"F32") + 2000] ^= 1
    path.write_bytes(data)
    assert cli.main(["store", "verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "lessons.db, record 1: its delta is not what was written" in told
    assert "everything is as it was written" not in told
    with pytest.raises(StoreDamaged, match="record 1"):
        serve(tmp_path)


def test_the_folder_of_an_earlier_version_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").mkdir()
    assert cli.main(["store", "verify", str(tmp_path)]) == 1
    assert "versions before 0.2.0 wrote and this one does not read" in capsys.readouterr().err
