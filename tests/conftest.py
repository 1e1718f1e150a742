import pytest
import torch

torch.set_num_threads(1)  # the tensors of the tests are small: a second thread mostly waits


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
