"""kill -9 a small training at 30 random moments; it must always resume and end with the undisturbed weights.

    python benchmarks/kills.py --result results/kills.json

The moments are uniform between the start of a process and a point where it has trained for a while: some fall
into its start, the others into steps, evaluations and saves (a checkpoint every second step).
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from attractor.checkpoint import Checkpoints
from attractor.results import write_result

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
STEPS = 1500
OPTIONS = f"""
    --model.context 16 --model.dim 32 --model.num-heads 2 --model.num-layers 2
    --train.batch-size 4 --train.max-steps {STEPS} --train.checkpoint-interval 2 --train.eval-interval 50
    --train.log-interval 1 --device cpu --resume auto
""".split()


def start(source: Path, run: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "attractor.cli", "train", "tiny_apn", "--data", str(source)]
    return subprocess.Popen(
        [*command, "--out", str(run), *OPTIONS],
        cwd=source.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def last_step(run: Path) -> int:
    newest = Checkpoints(run).newest("last")
    return int(newest.name.split("-")[1]) if newest else 0


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = Checkpoints(run).newest("last")
    assert newest is not None
    assert last_step(run) == STEPS
    return load_file(newest / "model.safetensors") | load_file(newest / "training.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.txt"
        source.write_text(" ".join(chance.choices(WORDS, k=4000)))
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        began = time.monotonic()
        undisturbed = start(source, whole)
        while last_step(whole) == 0 and undisturbed.poll() is None:
            time.sleep(0.01)
        starting = time.monotonic() - began
        if undisturbed.wait():
            raise SystemExit("the undisturbed run failed")
        longest = starting + (time.monotonic() - began - starting) / 15
        reached = []
        while len(reached) < options.kills:
            process = start(source, parts)
            try:
                code = process.wait(timeout=chance.uniform(0, longest))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                reached.append(last_step(parts))
                print(f"kill {len(reached):2d}: a checkpoint of step {reached[-1]} is left", flush=True)
                continue
            if code:
                raise SystemExit(f"attempt {len(reached) + 1} did not resume: exit code {code}")
            if last_step(parts) == STEPS:
                break
        if start(source, parts).wait():
            raise SystemExit("the last attempt did not resume")
        ours, theirs = final_weights(parts), final_weights(whole)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    print(f"{len(reached)} kills, weights, moments and random state equal: {same}")
    if options.result:
        write_result(
            options.result,
            {
                "experiment": "kills",
                "seed": options.seed,
                "config": OPTIONS,
                "kills": len(reached),
                "checkpoint_step_left_by_each": reached,
                "final_state_equal": same,
            },
        )
    return 0 if same and len(reached) == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
