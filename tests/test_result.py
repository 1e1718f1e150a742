"""Result files: what was written is read again, and people can read it too."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.results import write_result

numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text() | st.just("[\n1,\n2]") | st.just('a "[ 1, 2 ]" b')
anything = st.recursive(
    numbers | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


@settings(max_examples=40)
@given(st.dictionaries(texts.filter(lambda name: name != "provenance"), anything))
def test_what_is_written_is_read_again(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "result.json"  # a folder for each example takes its time
    write_result(path, values)
    read = json.loads(path.read_text())
    assert read.pop("provenance")["versions"]["torch"]
    assert read == values


def test_lists_of_numbers_stand_on_one_line(tmp_path):
    write_result(tmp_path / "result.json", {"usage": [[0.25, 0.5], [1, None]], "worst": math.inf, "none": []})
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert "    [ 0.25, 0.5 ]," in lines
    assert "    [ 1, null ]" in lines
    assert '  "worst": null,' in lines
