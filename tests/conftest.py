import dataclasses
import gc
import importlib.util
import inspect
import os

import pytest


def pytest_sessionstart(session):
    """Before any test is imported. A process that only hands tests out to others needs none of this, and
    they would wait until it has imported it.
    """
    if session.config.getoption("dist", "no") != "no":
        return
    import hypothesis
    import torch

    torch.set_num_threads(1)  # the tensors of the tests are small: a second thread mostly waits
    # The same examples every time, and no verdict that depends on how busy the machine is.
    hypothesis.settings.register_profile(
        "steady",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("steady")
    if not torch.cuda.is_available():  # then Triton kernels run in Triton's interpreter, if Triton is there
        os.environ["TRITON_INTERPRET"] = "1"
        if importlib.util.find_spec("triton"):
            remember_what_the_interpreter_replaces()


def remember_what_the_interpreter_replaces():
    """Triton's interpreter looks for the builtins of its language at every call of a function, and makes a
    table of types at every operation: half of its time. They are the same every time: looked for once, here;
    a function that is called by another finds them replaced.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, f"_{name}") for name in ("patch_lang", "get_np_dtype", "LangPatchScope")):
        return  # another version of Triton: slower, and nothing else
    places = (tl, tl.core, tl.math, tl.tensor, getattr(tl.core, "tensor_descriptor_base", tl.tensor))
    names = {
        place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        for place in places
    }
    look, replace, languages = interpreter._patch_builtin, interpreter._patch_lang, {}
    to_numpy, types = interpreter._get_np_dtype, {}

    def patch(place, *others):
        if place not in names:
            return look(place, *others)
        for name in names[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):  # and not replaced already, by the function that called this one
                interpreter._patch_attr(place, name, member, *others)

    def patch_all(function):
        known = id(function.__globals__)
        if known not in languages:
            languages[known] = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        if languages[known] and not any(tl.core.is_builtin(language.load) for language in languages[known]):
            return interpreter._LangPatchScope()  # nothing to be put back
        return replace(function)

    def numpy_type(of):
        scalar = of.scalar
        if isinstance(scalar, tl.pointer_type):
            return to_numpy(scalar)
        if scalar.name not in types:
            types[scalar.name] = to_numpy(scalar)
        return types[scalar.name]

    interpreter._patch_builtin, interpreter._patch_lang = patch, patch_all
    interpreter._get_np_dtype = numpy_type


def pytest_pycollect_makemodule(module_path, parent):
    """The plugin of schemathesis takes a second of every process to import: only one module needs it."""
    if module_path.name == "test_http_security.py":
        parent.config.pluginmanager.import_plugin("schemathesis.pytest.plugin")


def pytest_collection_finish():
    """What the imports have made stays: a collector that looks through it again and again takes a quarter of
    the time of tests that make many small objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture
def two_threads():
    import torch

    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


WORDS = {
    "shakespeare": "to be or not to be that is the question whether tis nobler in the mind to suffer",
    "kjv": "and it came to pass in those days that there went out a decree from Caesar Augustus",
    "first-folio": "Enter Barnardo and Francisco two Centinels who's there nay answer me stand & vnfold",
    "python": "def of(self, config: int) -> None:\n    return [x for x in range(config)]  # 0123456789",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files of random words, long enough for the smallest size."""
    import numpy as np

    folder, chance = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    found = {}
    for name, words in WORDS.items():
        chosen = chance.choice(words.split(" "), 20_000)
        (folder / f"{name}.txt").write_text(" ".join(chosen))
        found[name] = str(folder / f"{name}.txt")
    return found


@pytest.fixture(scope="module")
def tiny_plan():
    """The smallest size with less to train and less to measure with."""
    from studies.plan import PLANS  # not before the interpreter is chosen

    smoke = PLANS["smoke"]
    train = dataclasses.replace(smoke.train, max_steps=20, eval_interval=20, checkpoint_interval=20)
    plan = dataclasses.replace(
        smoke, train=train, test_bytes=1024, val_bytes=512, mixture_steps=20, stream_tokens=768
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANS, "smoke", plan)
        yield plan


@pytest.fixture(scope="module")
def bench(texts, tiny_plan, tmp_path_factory):
    """That size on those texts, with cells that a module shares."""
    from studies.cells import Benchmark

    return Benchmark("smoke", tmp_path_factory.mktemp("bench"), domains=texts, device="cpu")


@pytest.fixture
def service():
    """A service without a model. Modules that serve a model have a fixture of this name of their own."""
    from fake_service import FakeService

    return FakeService()


@pytest.fixture
def client(service):
    """Requests to an app of that service."""
    from starlette.testclient import TestClient

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app

    with TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client:
        yield client
