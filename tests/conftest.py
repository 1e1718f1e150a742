import os

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # then Triton kernels run in Triton's interpreter, if Triton is there
    os.environ["TRITON_INTERPRET"] = "1"
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


@pytest.fixture
def two_threads():
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
    folder, chance = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    found = {}
    for name, words in WORDS.items():
        chosen = chance.choice(words.split(" "), 20_000)
        (folder / f"{name}.txt").write_text(" ".join(chosen))
        found[name] = str(folder / f"{name}.txt")
    return found


@pytest.fixture(scope="module")
def bench(texts, tmp_path_factory):
    """The smallest size on those, with cells that a module shares."""
    from attractor.experiments.benchmark import Benchmark  # not before the interpreter is chosen

    return Benchmark("smoke", tmp_path_factory.mktemp("bench"), domains=texts, device="cpu")
