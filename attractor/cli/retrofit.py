"""attractor retrofit"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attractor.cli.common import INTERRUPTED, Device, progress_bar
from attractor.config import APNConfig, check_number, check_size


@dataclass(kw_only=True)
class RetrofitModel:
    """Give a Hugging Face model APN layers beside its FFNs, and teach them a text; the model is frozen."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(name="model", metavar="MODEL")]
    """A folder, a .gguf file, ORGANISATION/NAME on the hub, or smollm2-135m, which needs no hub."""
    data: str
    """What to learn: a name of `attractor data list`, a file, a folder or a quoted glob."""
    out: Path = Path("runs/retrofit")
    """Gets adapter/ and summary.json; every verb takes this folder as a MODEL."""
    apn: Annotated[APNConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: APNConfig(num_patches=16, top_k=8, rank=64)
    )
    layers: str = "all"
    """All blocks, their numbers ("0,1,2"), or a pattern ("model.layers.[0-3].mlp")."""
    start: Literal["random", "kmeans"] = "kmeans"
    """The prototypes to start from: random ones, or centres of what the model's FFNs are given."""
    steps: int = 300
    """Training steps."""
    batch_size: int = 8
    """Sequences of a step."""
    context: int = 256
    """Tokens of a sequence."""
    learning_rate: float = 1e-2
    """The largest learning rate; patches need a larger one than LoRA or fine-tuning."""
    val_fraction: float = 0.05
    """The share of the text, from its end, that is held out; the layers that predict it best are kept."""
    seed: int = 0
    """The same seed gives the same first weights and the same batches."""
    device: Device = None

    def run(self) -> int:
        check_number("val_fraction", self.val_fraction, "between 0 and 1", lambda part: 0 < part < 1)
        for name in ("steps", "batch_size", "context"):
            check_size(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate, "a positive number", lambda rate: rate > 0)
        check_number("seed", self.seed, "a whole number, 0 or more", lambda n: n >= 0 and n == int(n))
        import torch

        from attractor import distributed, retrofit
        from attractor.data import read_text
        from attractor.hf import CausalLM
        from attractor.hf.pretrained import check_source, load_pretrained
        from attractor.hf.teach import teach
        from attractor.results import write_result
        from attractor.trainer import stop_on_signal

        device = distributed.parse_device(self.device)
        check_source(self.source)
        adapter, record = self.out / "adapter", self.out / "summary.json"
        for place in (adapter, record):
            if place.exists():
                raise ValueError(f"{place} is there already: choose another --out")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is a file: choose a folder")
        text = read_text(self.data)
        model, tokenizer = load_pretrained(self.source, device=device)
        tokens = tokenizer.encode(text)
        held_out = int(len(tokens) * self.val_fraction)
        if held_out <= self.context or len(tokens) - held_out <= self.context:
            raise ValueError(
                f"{self.data!r} has {len(tokens):,} tokens: too few to learn from and to hold out "
                f"{held_out:,} of, in sequences of {self.context}"
            )
        train, validation = tokens[:-held_out], tokens[-held_out:]
        rows = train[: 32 * self.context][: len(train) // self.context * self.context]
        sample = torch.from_numpy(rows.reshape(-1, self.context))
        net = retrofit(
            model,
            self.apn,
            layers=self._layers(),
            prototypes=self.start,
            seed=self.seed,
            sample=sample if self.start == "kmeans" else None,
            dtype=torch.float32,
        )
        net.print_trainable_parameters()
        summary = {
            "experiment": "attractor retrofit",
            "model": self.source,
            "data": self.data,
            "apn": self.apn.to_dict(),
            "seed": self.seed,
        }

        def keep() -> None:
            net.save_pretrained(adapter)
            write_result(record, summary)  # the rest when it is known

        with stop_on_signal() as stopped, progress_bar(self.steps, "retrofit") as report:
            done = teach(
                CausalLM(net, context=self.context),
                net.trainable_parameters(),
                train,
                validation,
                steps=self.steps,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=self.seed,
                keep=keep,
                stop=stopped,
                report=report,
            )
        if not math.isfinite(done["best"]):
            raise ValueError("the model cannot predict this text: no loss was finite, and nothing was kept")
        if done["diverged"]:
            print(f"step {done['steps']} diverged: try a --learning-rate below {self.learning_rate:g}")
        write_result(record, summary | done)
        print(
            f"perplexity of the held-out text {math.exp(done['before']):.3f} -> {math.exp(done['best']):.3f} "
            f"(step {done['best_step']}); the layers are in {adapter}"
        )
        return INTERRUPTED if done["stopped"] else 0

    def _layers(self) -> str | list[int]:
        numbers = self.layers.split(",")
        return [int(number) for number in numbers] if all(n.isdigit() for n in numbers) else self.layers
