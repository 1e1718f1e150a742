"""attractor bench layer|train|decode"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from attractor import presets
from attractor.cli.common import Device, JSONFile, otherwise
from attractor.config import check_choice, check_size


@dataclass(kw_only=True)
class BenchLayer:
    """Time the layer beside the dense FFN, an adapter and an MoE: forward, backward, memory."""

    device: Device = None
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        otherwise("bfloat16 on a GPU, float32 on a CPU", "NAME"),
    ] = None
    """The type of the numbers."""
    sweep: bool = False
    """Many sizes around the paper's instead of the four of docs/performance.md."""
    sizes: tuple[str, ...] = ()
    """These sizes instead: width,tokens,patches,rank,active, such as 1536,16384,48,128,8."""
    compiled: bool = False
    """Also what torch.compile makes of each, in its default mode."""
    only: tuple[str, ...] = ()
    """Only these beside dense: adapter, moe, and the backends reference, grouped and triton."""
    rounds: int = 1
    """Take turns this often and give medians; 3 or more on a machine that does other work."""
    json: JSONFile = None

    def run(self) -> None:
        from attractor import bench, distributed

        device = distributed.parse_device(self.device)
        check_size("rounds", self.rounds)
        dtype = self.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        usual = bench.SIZES if device.type == "cuda" else bench.SIZES[:1]
        chosen = [bench.size_of(size) for size in self.sizes]
        sizes = chosen or (bench.sweep_sizes() if self.sweep else usual)
        dtypes, how = bench.DTYPES[dtype], (self.rounds, self.compiled, self.only)
        results = bench.bench_layer(sizes, device, dtypes, print, *how)
        experiment = "bench layer --sweep" if self.sweep else "bench layer"
        _write(self.json, experiment, {"dtype": dtype, "rounds": self.rounds}, results=results)


@dataclass(kw_only=True)
class BenchTrain:
    """Time whole training steps: data, forward, backward, clipping and the optimizer."""

    presets: tuple[str, str] = ("paper_dense", "paper_apn")
    """The first is what the second is compared with."""
    steps: int = 60
    """Steps that are timed."""
    device: Device = None
    json: JSONFile = None

    def run(self) -> None:
        from attractor import bench, distributed

        device = distributed.parse_device(self.device)
        check_size("steps", self.steps)
        _check_presets(self.presets)
        rows = [bench.measure_train(preset, device, self.steps) for preset in self.presets]
        ratio = rows[1]["step"] / rows[0]["step"]
        print(f"a step of {self.presets[1]} takes {ratio:.3f} of one of {self.presets[0]}")
        _write(self.json, "bench train", {"steps": self.steps}, rows=rows, ratio=ratio)


@dataclass(kw_only=True)
class BenchDecode:
    """Time the next token of one and of several streams, half a context into the text."""

    presets: tuple[str, str] = ("paper_dense", "paper_apn")
    """The first is what the second is compared with."""
    streams: tuple[int, ...] = (1, 64)
    """How many texts are written at a time, one measurement for each number."""
    device: Device = None
    json: JSONFile = None

    def run(self) -> None:
        import torch

        from attractor import bench, distributed

        device = distributed.parse_device(self.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        _check_presets(self.presets)
        results = []
        for streams in self.streams:
            check_size("streams", streams)
            dense, apn = (bench.measure_decode(name, streams, device, dtype) for name in self.presets)
            ratios = {kind: apn[kind] / dense[kind] for kind in ("graph", "eager") if kind in dense}
            results.append({"streams": streams, "rows": [dense, apn], "ratios": ratios})
            shown = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items())
            print(f"{streams} streams, {self.presets[1]} over {self.presets[0]}: {shown}")
        _write(self.json, "bench decode", {"dtype": str(dtype)}, results=results)


BENCH = {"layer": BenchLayer, "train": BenchTrain, "decode": BenchDecode}


def _check_presets(names: tuple[str, ...]) -> None:
    for name in names:
        check_choice("preset", name, tuple(presets.NAMES))


def _write(path: Path | None, experiment: str, config: dict[str, Any], **values: Any) -> None:
    from attractor.results import write_result

    if path is not None:
        write_result(path, {"experiment": experiment, "config": config, "seed": 0, **values})
