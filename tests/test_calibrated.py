"""A base is calibrated on the default background once: what is kept is what was measured, to the bit."""

import logging
import os

import pytest
import torch
from test_lessons import CONFIG, background, encode, llama

from attractor.hf import calibrated, teachable
from attractor.hf.teachable import Calibration


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTRACTOR_CACHE", str(tmp_path / "cache"))
    texts = ["".join(map(chr, row)) for row in background().tolist()]
    monkeypatch.setattr(teachable, "default_background", lambda: texts)
    return tmp_path / "cache" / "calibrations"


@pytest.fixture
def measured(monkeypatch):
    """How often background text was read."""
    calls = []
    fit = Calibration.fit

    def counted(*given, **options):
        calls.append(given)
        return fit(*given, **options)

    monkeypatch.setattr(Calibration, "fit", counted)
    return calls


def school(model=None, **options):
    settings = {"window": 24, "act_at": 3, "config": CONFIG, **options}
    return teachable.teachable(llama() if model is None else model, encode, **settings)[1]


def assert_same(one, other):
    assert one.unit == other.unit
    for name, value in vars(one.calibration).items():
        assert torch.equal(value, getattr(other.calibration, name)), name


def test_the_second_time_nothing_is_read(cache, measured):
    first, second = school(), school()
    assert len(measured) == 1
    assert_same(first, second)
    assert_same(first, school(background=background()))  # what was measured without a cache
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", ["weights", "configuration", "text", "settings", "code"])
def test_whatever_it_depends_on_is_part_of_its_name(change, cache, measured, monkeypatch):
    school()
    model, options = llama(), {}
    if change == "weights":
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
    elif change == "configuration":
        model.config.rms_norm_eps = 1e-4
    elif change == "text":
        monkeypatch.setattr(teachable, "default_background", lambda: ["now" * 400])
    elif change == "settings":
        options["read_attention"] = [0]
    else:
        monkeypatch.setattr(calibrated.inspect, "getsource", lambda module: "changed")
    school(model, **options)
    assert len(measured) == len(list(cache.iterdir())) == 2


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, lambda path: path.write_bytes(b"")])
def test_what_is_damaged_is_told_and_measured_again(damage, cache, measured, caplog):
    first = school()
    (path,) = cache.iterdir()
    damage(path)
    assert_same(first, school())
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"cannot use {path} (")
    assert warning.endswith("; calibrating again")
    assert_same(first, school())
    assert len(measured) == 2


def test_one_calibration_is_not_taken_for_another(cache, measured):
    school()
    (path,) = cache.iterdir()
    other = school(read_attention=[0])
    (second,) = set(cache.iterdir()) - {path}
    second.write_bytes(path.read_bytes())
    assert_same(other, school(read_attention=[0]))
    assert len(measured) == 3


def test_without_a_cache_it_is_still_measured(cache, measured, tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    assert_same(school(), school())
    assert len(measured) == 2
    assert "could not keep" in caplog.text


def test_text_of_ones_own_leaves_nothing(cache):
    school(background=background())
    assert not cache.exists()


def test_the_oldest_go(cache, monkeypatch):
    monkeypatch.setattr(calibrated, "KEPT", 2)
    for number, heard in enumerate(([], [0], [1])):
        known = set(cache.glob("*"))
        school(read_attention=heard)
        (new,) = set(cache.glob("*")) - known
        os.utime(new, (number, number))
    assert len(list(cache.iterdir())) == 2
    assert new in cache.iterdir()


def test_a_failure_leaves_the_model_as_it_was(cache, monkeypatch):
    model = llama()

    def fail(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Calibration, "fit", fail)
    with pytest.raises(KeyboardInterrupt):
        school(model)
    monkeypatch.undo()
    assert not cache.exists()
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, llama()(tokens).logits)
