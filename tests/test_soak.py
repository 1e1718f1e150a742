"""The short form of `make soak`: what must hold holds; how long things take is not asked here."""

import json
import subprocess
import sys

import pytest
import soak


@pytest.mark.parametrize("part", soak.KILLS)
def test_kills_lose_nothing(part: str) -> None:
    command = [sys.executable, soak.__file__, part, "--kills", "2", "--points", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    wrong = {name: found[name] for name in ("lost", "twice", "unasked", "differs_from_oracle")}
    assert wrong == dict.fromkeys(wrong, 0)
    assert found["opened"] > 5
    assert found["acknowledged"] > 0


def test_a_rollback_of_many_lessons_is_exact() -> None:
    assert soak.rollback(lessons=60, before=10)["bit_exact"]


def test_many_clients_see_no_mixed_versions() -> None:
    found = soak.clients(seconds=2.0, count=16)
    assert found["errors"] == found["mixed"] == 0
    assert found["texts"] > 0
    assert found["lessons"] > 0
