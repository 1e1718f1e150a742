import os

import hypothesis
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
