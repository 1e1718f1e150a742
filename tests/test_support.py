"""The page that says which features work with which families is as the script writes it."""

import json
import re

import pytest

for package in ("transformers", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed: the extra hf")

import support  # noqa: E402 (it needs them)
import transformers  # noqa: E402


def table():
    """What the page says: family -> feature -> yes or no."""
    rows = re.findall(r"^\| (.*) \|$", support.PAGE.read_text(), re.MULTILINE)
    header, *cells = (row.split(" | ") for row in rows)
    return {name: dict(zip(header[1:], own, strict=True)) for name, *own in cells}


def test_it_has_every_family_and_every_feature():
    assert {name: list(own) for name, own in table().items()} == {
        family: list(support.FEATURES) for family in support.FAMILIES
    }


@pytest.mark.parametrize(
    "feature", ["device maps", "dynamic cache", "static cache", "over LoRA"]
)  # others have tests
@pytest.mark.filterwarnings("ignore")
def test_a_cell_is_what_is_found(feature):
    assert support.tried(support.FEATURES[feature], "llama") == table()["llama"][feature] == "yes"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_cell_is_what_is_found():
    transformers.utils.logging.disable_progress_bar()
    found = {
        family: {name: support.tried(check, family) for name, check in support.FEATURES.items()}
        for family in support.FAMILIES
    }
    assert support.page(found, support.versions()) == support.PAGE.read_text()


def test_the_page_is_what_the_result_says():
    told = json.loads(support.RESULT.read_text())
    assert support.page(told["found"], told["packages"]) == support.PAGE.read_text()


def test_a_reason_is_told_and_is_no_yes():
    def fails(family, folder):
        raise ValueError("there is | no such thing\nat all")

    said = support.tried(fails, "llama")
    assert said == "no: ValueError, there is / no such thing"
    page = support.page({"llama": dict.fromkeys(support.FEATURES, said)}, support.versions())
    assert "| llama | no (1) | no (1) |" in page
    assert "1. ValueError, there is / no such thing" in page
