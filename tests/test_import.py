"""What an import does not do: warn, open a connection, or start a process."""

import subprocess
import sys

import pytest

WATCHED = """
import sys

def refuse(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "urllib.")):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
import attractor
for name in sys.argv[1:]:
    getattr(attractor, name)
"""


def imported(*names):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WATCHED, *names], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_is_silent_and_stays_on_this_machine():
    imported("GPT", "Trainer", "GuardedLearner", "load")


@pytest.mark.slow
def test_so_is_the_import_of_everything():
    import attractor

    imported(*attractor.__all__)
