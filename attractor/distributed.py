"""Several processes, one run: the same command under torchrun.

    torchrun --standalone --nproc-per-node 2 -m attractor.cli train tiny_apn --train.parallel fsdp

"ddp" keeps the whole model in every process, "fsdp" (FSDP2) a part of every tensor: of the patch banks, whose
first dimension is the patch, each process keeps its own patches. Only process 0, the leader, reads and writes
the run's folder, so that processes need not share a disk.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from attractor.model import GPT


@dataclass(frozen=True)
class World:
    """Who we are among the processes of a run. Alone, every method is the identity."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values := values.clone())
        return values

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def stack(self, values: Tensor) -> Tensor:
        """The values of every process, (size, ...)."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, values)
        return torch.stack(parts if self.size > 1 else [values])

    def any(self, flag: bool) -> bool:
        """True everywhere if it is true anywhere: processes that disagree about stopping wait forever."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def from_leader(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in the leader, in every process; what it raises, in every process too."""
        answer: list[Any] = [None, None]
        if self.is_leader:
            try:
                answer[0] = make()
            except Exception as error:
                answer[1] = error
        if self.size > 1:
            dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def one_per_machine_first(self, make: Callable[[], Any]) -> Any:
        """The first process of each machine goes ahead; the others find its work done, or that it failed."""
        made, error = None, None
        if self.local_rank == 0:
            try:
                made = make()
            except Exception as raised:
                error = raised
        failed = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise ValueError("another process failed; its message says why")
        return made if self.local_rank == 0 else make()


def parse_device(name: str | None, *, must_exist: bool = True) -> torch.device:
    """The device a person named, or the GPU if there is one; what this machine lacks is a ValueError."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown; say cpu, cuda or cuda:1") from error
    if device.type == "meta":
        raise ValueError("device='meta' holds no numbers; say cpu, cuda or cuda:1")
    if must_exist and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: torch sees {torch.cuda.device_count()} GPUs here")
    return device


@contextmanager
def world(device: str | None = None) -> Iterator[tuple[World, torch.device]]:
    """The processes torchrun started, or this one alone; and the device that is ours."""
    chosen = parse_device(device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield World(), chosen
        return
    ours = World(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    if chosen.type == "cuda":
        if chosen.index is not None:
            raise ValueError(f"device={device!r}: torchrun gives each process its own GPU; say cuda")
        if ours.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {ours.local_rank} of this machine has no GPU of its own; --nproc-per-node must be "
                f"at most {torch.cuda.device_count()}"
            )
        chosen = torch.device("cuda", ours.local_rank)
        torch.cuda.set_device(chosen)
    # flags and counters are CPU tensors: agreeing on them must not wait for the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    yield ours, chosen
    # Not after an exception: the others may be waiting for us, and only torchrun can end that.
    gc.collect()  # gloo's threads abort an interpreter that ends while they hold a sharded tensor
    dist.destroy_process_group()


def spread(model: GPT, parallel: str, world: World, device: torch.device) -> nn.Module:
    """The module to train with, whose gradients are averaged over the processes; "fsdp" shards `model`."""
    if world.size == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (world.size,))
    for module in (*model.blocks, model):
        # the root too: else an evaluation leaves it whole, and the optimizer looks for its shards in vain
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


def average_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass averages, or leaves that to a later one (gradient accumulation)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    elif isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
