"""Two gloo processes: the layer under DDP, where a missing gradient would hang or raise."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from attractor import APN


def _worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = APN(8, num_patches=50, top_k=2, rank=3)
    model = DistributedDataParallel(layer)
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # DDP complains in the second step about parameters that got no gradient in the first
        model(batch[rank * 3 : rank * 3 + 3]).square().mean().backward()
    shared = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    for _ in range(2):
        layer(batch).square().mean().backward()
    for got, parameter in zip(shared, layer.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)
    dist.destroy_process_group()


@pytest.mark.dist
def test_ddp_gradients_equal_one_process():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_worker, args=(port,), nprocs=2)
