"""Two gloo processes: the same losses as one, checkpoints that any number of processes can read, no hangs."""

import dataclasses
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_trainer import Trainer, config_for, dataset, weights  # noqa: F401 (the fixture)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from attractor import APN
from attractor.data import Dataset
from attractor.distributed import World
from attractor.model import GPT

pytestmark = pytest.mark.dist


def in_two_processes(work, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(
        _worker, args=(port, work, arguments), nprocs=2, start_method="forkserver"
    )


def _worker(rank, port, work, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    work(World(rank, 2, rank), *arguments)
    gc.collect()  # as distributed.world does
    dist.destroy_process_group()


def _gradients(world):
    torch.manual_seed(0)
    layer = APN(8, num_patches=50, top_k=2, rank=3)
    model = DistributedDataParallel(layer)
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # DDP complains in the second step about parameters that got no gradient in the first
        model(batch[world.rank * 3 : world.rank * 3 + 3]).square().mean().backward()
    shared = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    for _ in range(2):
        layer(batch).square().mean().backward()
    for got, parameter in zip(shared, layer.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


def test_ddp_gradients_equal_one_process():
    in_two_processes(_gradients)


def _train(world, folder, config, run):
    trainer = Trainer(config, Dataset.open(folder), run, world=world)
    if config.train.parallel == "fsdp":
        for layer in trainer.model.apn_layers().values():
            for name in ("prototypes", "gate_slope", "gate_bias", "decoder"):
                bank = getattr(layer, name)
                assert isinstance(bank, DTensor)
                assert bank.placements == (Shard(0),)  # by patch: this process keeps half of the patches
                assert bank.to_local().shape == (layer.config.num_patches // 2, *bank.shape[1:])
    trainer.resume()
    trainer.run()


def same_numbers(data, **changes):
    """A configuration whose losses do not depend on the number of processes."""
    config = config_for(data, **({"max_steps": 20, "batch_size": 8, "checkpoint_interval": 10} | changes))
    apn = dataclasses.replace(config.model.apn, patch_dropout=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0, apn=apn))


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], kind, r[kind]) for r in records for kind in ("train/loss", "val/loss") if kind in r]


def assert_same_losses(run, other, tolerance=1e-5):
    ours, theirs = losses(run), losses(other)
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    assert [entry[2] for entry in ours] == pytest.approx([entry[2] for entry in theirs], abs=tolerance)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(dataset, tmp_path, parallel):  # noqa: F811
    config = same_numbers(dataset, parallel=parallel, accumulation=2, balance_weight=0.0)
    Trainer(config, dataset, tmp_path / "one").run()
    in_two_processes(_train, dataset.folder, config, tmp_path / "two")
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one.keys() - {"random.cpu"}:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=0)


def test_checkpoints_do_not_care_how_many_processes_wrote_them(dataset, tmp_path, caplog):  # noqa: F811
    """fsdp on two for 5 steps, alone to 10, ddp on two to 15, fsdp on two to 20: as if alone all the way."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"

    def until(steps, **changes):
        # the schedule must not change with the stop: so end early by an interval, not by max_steps
        config = same_numbers(dataset, eval_interval=5, checkpoint_interval=5, **changes)
        flat = {"learning_rate": 1e-3, "min_learning_rate": 1e-3, "warmup_steps": 0, "max_steps": steps}
        return dataclasses.replace(config, train=dataclasses.replace(config.train, **flat))

    Trainer(until(20), dataset, whole).run()
    in_two_processes(_train, dataset.folder, until(5, parallel="fsdp"), parts)
    assert GPT.from_pretrained(next((parts / "checkpoints").glob("last-*"))).config == until(5).model
    alone = Trainer(until(10), dataset, parts)
    assert alone.resume()
    assert "2 processes saved this and 1 go on" in caplog.text
    assert alone.step == 5
    alone.run()
    in_two_processes(_train, dataset.folder, until(15, parallel="ddp"), parts)
    in_two_processes(_train, dataset.folder, until(20, parallel="fsdp"), parts)
    assert_same_losses(whole, parts)


def _disagree(world):
    assert world.any(world.rank == 1)
    assert not world.any(False)
    assert world.from_leader(lambda: world.rank) == 0
    with pytest.raises(ValueError, match="only the leader knows"):
        world.from_leader(_fail)
    assert world.stack(torch.tensor([world.rank])).tolist() == [[0], [1]]
    assert world.one_per_machine_first(lambda: world.rank) == world.rank
    with pytest.raises(
        ValueError, match="only the leader knows" if world.is_leader else "another process failed"
    ):
        world.one_per_machine_first(_fail)


def _fail():
    raise ValueError("only the leader knows")


def test_processes_agree():
    in_two_processes(_disagree)


def test_a_batch_that_cannot_be_shared_is_refused(dataset, tmp_path):  # noqa: F811
    with pytest.raises(
        ValueError, match=r"batch_size=4 must be a multiple of 2 processes times accumulation=4"
    ):
        Trainer(config_for(dataset, accumulation=4), dataset, tmp_path, world=World(0, 2, 0))


def test_torchrun_and_a_signal_to_one_process(dataset, tmp_path):  # noqa: F811
    """The real command: SIGTERM to one worker stops both after the same step, saves, and can be resumed."""
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "attractor.cli",
        "train",
        "tiny_apn",
        "--data",
        str(dataset.folder),
        "--model.context",
        "8",
        "--model.dim",
        "16",
        "--model.num-heads",
        "2",
        "--train.batch-size",
        "4",
        "--train.max-steps",
        "100000",
        "--train.eval-interval",
        "100000",
        "--train.log-interval",
        "1",
        "--train.parallel",
        "fsdp",
        "--out",
        str(run),
        "--device",
        "cpu",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text()) < 200:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        os.kill(int(workers.stdout.split()[-1]), signal.SIGTERM)
        process.wait(timeout=300)
    finally:
        process.terminate()  # torchrun takes its workers along
        process.wait(timeout=300)
    folder = next((run / "checkpoints").glob("last-*"))
    assert json.loads((folder / "training.json").read_text())["step"] == int(folder.name[-8:]) > 0
