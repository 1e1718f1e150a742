"""Docstrings of what the package exports: each is there, and its examples print what they say."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

import attractor

NAMES = [name for name in attractor.__all__ if name not in ("__version__", "analysis", "monitor")]
EXAMPLES = [
    *("GPT", "Guard", "GuardedLearner", "OnlineLearner", "Trainer", "prepare"),
    *("CausalLM", "load_retrofit", "retrofit"),
    *("APN", "APNConfig", "GPTConfig", "Job", "Model", "Service", "load_resized", "warmup_factor"),
]
"""An example of each is run."""


def exported(name):
    if name in ("APNCallback", "CausalLM", "load_retrofit", "retrofit"):
        pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")
    return getattr(attractor, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_export_says_what_it_is(name):
    thing = exported(name)
    inherited = thing.__base__.__doc__ if inspect.isclass(thing) else None
    assert thing.__doc__
    assert thing.__doc__ != inherited


def test_the_reference_has_every_export():
    page = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
    listed = re.findall(r"^::: attractor\.(\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(attractor.__all__) - {"__version__"})


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_say(name):
    thing = exported(name)
    (found,) = (test for test in doctest.DocTestFinder(recurse=False).find(thing, name, globs={}))
    assert found.examples
    complaints = []
    doctest.DocTestRunner().run(found, out=complaints.append)
    assert not complaints, "".join(complaints)
