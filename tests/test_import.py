"""What an import does not do: warn, open a connection, or start a process."""

import pkgutil
import subprocess
import sys

import pytest

WATCHED = """
import sys

def refuse(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "urllib.")):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
import importlib
import attractor
for name in sys.argv[1:]:
    if name.startswith("attractor."):
        importlib.import_module(name)
    else:
        getattr(attractor, name)
"""


def imported(*names):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WATCHED, *names], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_is_silent_and_stays_on_this_machine():
    imported("GPT", "Trainer", "GuardedLearner", "load")


def test_a_server_of_our_own_models_needs_no_transformers():
    script = "import sys; sys.modules['transformers'] = None; import attractor.serve.service"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_so_is_the_import_of_everything():
    import attractor

    imported(*attractor.__all__)


@pytest.mark.slow
def test_and_of_every_module():
    for package in ("fastapi", "tokenizers", "transformers", "triton", "tyro"):
        pytest.importorskip(package, reason=f"{package} is not installed: the extra dev")
    import attractor

    found = [module.name for module in pkgutil.walk_packages(attractor.__path__, "attractor.")]
    assert len(found) > 100
    imported(*(name for name in found if not name.endswith("__main__")))
