import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attractor import APNConfig

configs = st.builds(
    APNConfig,
    num_patches=st.integers(8, 10**6),
    top_k=st.integers(1, 8),
    rank=st.integers(4, 512),
    temperature=st.floats(1e-6, 1e6),
    scale=st.floats(-10, 10),
    routing=st.sampled_from(["cosine", "dot"]),
    dropout=st.floats(0, 0.99),
    decoder=st.just("shared"),
    offset_rank=st.none() | st.integers(1, 4),
    layer_norm=st.booleans(),
)


@given(configs)
def test_json_round_trip(config):
    assert APNConfig.from_json(config.to_json()) == config


def test_a_missing_field_takes_its_default():
    assert APNConfig.from_json('{"schema_version": 1, "rank": 8}') == APNConfig(rank=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a configuration"),
        ("[1]", "expected a JSON object, got list"),
        ('{"rank": 8}', "schema_version=None: this release of attractor reads 1"),
        ('{"schema_version": 2}', "schema_version=2"),
        ('{"schema_version": 1, "ranks": 8}', r"unknown fields \['ranks'\]"),
        ('{"schema_version": 1, "rank": -8}', "rank=-8 must be a positive integer"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        APNConfig.from_json(text)


def test_it_is_frozen_and_plain():
    config = APNConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3
    assert json.loads(config.to_json())["rank"] == 32
