"""Training a model on a dataset: the one loop, with evaluation, logs, checkpoints and a stop on a signal.

    trainer = Trainer(presets.tiny_apn(), Dataset.open("data/shakespeare"), Path("runs/tiny"))
    summary = trainer.run()

A run folder holds config.json, metrics.jsonl, TensorBoard events and checkpoints/. On the CPU a run that was
interrupted and resumed ends with the same bytes as one that was not.
"""

import dataclasses
import json
import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import analysis, monitor
from attractor.checkpoint import (
    Checkpoints,
    gather_model,
    gather_training,
    read_training,
    spread_state,
    write_training,
)
from attractor.config import GPTConfig, RunConfig, TrainConfig
from attractor.data import Batches, Dataset
from attractor.distributed import World, average_gradients, spread
from attractor.evaluate import autocast, evaluate, perplexity, routing
from attractor.files import finite, read_jsonl, write_text
from attractor.layer import APN, ROLES, warmup_factor
from attractor.loop import Loop, descend, move_rows
from attractor.model import GPT
from attractor.tokenizer import load as load_tokenizer

log = logging.getLogger("attractor")

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "T4": 65e12}
"""Dense bfloat16 (T4: float16) rates from the vendors' data sheets, for MFU."""


class NotFiniteLoss(RuntimeError):
    """The loss became NaN or infinite. The last checkpoint was written before that."""


class Trainer(Loop):
    """Train a new model on a dataset: log, evaluate, save, and go on after a stop.

    `config` has the model and the settings of the run, `dataset` the text, and `run` is the folder for logs
    and checkpoints. `device` is the GPU where there is one. `report` is called with every record of the log.

    >>> import dataclasses, tempfile
    >>> from pathlib import Path
    >>> from attractor import Trainer, prepare, presets
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "my.txt").write_text("Once upon a time there was a router. " * 200)
    >>> dataset = prepare(folder / "my.txt", folder / "data")
    >>> config = presets.tiny_apn()
    >>> model = dataclasses.replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    >>> train = dataclasses.replace(config.train, max_steps=2, batch_size=2)
    >>> config = dataclasses.replace(config, model=model, train=train)
    >>> summary = Trainer(config, dataset, folder / "run", device="cpu").run()
    >>> summary["step"], summary["interrupted"]
    (2, False)

    `resume` goes on from the last checkpoint. A vocabulary that does not fit the model and a batch that does
    not fit the processes are a ValueError; a loss that is not finite is a NotFiniteLoss, and the last
    checkpoint stays. Seconds in the summary are those of training alone, over all resumptions.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        run: Path,
        *,
        device: str | torch.device | None = None,
        backend: str = "auto",
        world: World | None = None,
        report: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        if dataset.tokenizer.vocab_size != config.model.vocab_size:
            raise ValueError(
                f"the data has {dataset.tokenizer.vocab_size} tokens in its vocabulary and the model "
                f"{config.model.vocab_size}; set model.vocab_size"
            )
        self.config, self.dataset, self.folder, self.report = config, dataset, Path(run), report
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.world = world = world or World()
        train = config.train
        if train.batch_size % (train.accumulation * world.size):
            raise ValueError(
                f"batch_size={train.batch_size} must be a multiple of {world.size} processes times "
                f"accumulation={train.accumulation}"
            )
        self.batches = Batches(
            dataset.train, train.batch_size, config.model.context, train.seed, world.rank, world.size
        )
        torch.manual_seed(train.seed)
        self.model = GPT(config.model, backend=backend).to(self.device)
        if world.rank:  # the same weights everywhere, but every process drops other activations
            torch.manual_seed(train.seed + world.rank)
        self.flops_per_token = 6 * analysis.model_multiply_adds(self.model)
        if world.size > 1 and any(x.config.sparse_gradients for x in self.model.apn_layers().values()):
            raise ValueError(
                f"sparse_gradients=True cannot be averaged over {world.size} processes: train in one, or "
                "leave it out"
            )
        self.spread = spread(self.model, train.parallel, world, self.device)
        on_gpu = self.device.type == "cuda"
        self.compiled: Callable[..., Any] = self.spread
        if train.compile or (train.compile is None and on_gpu):
            # CUDA graphs: the APN kernels are short, and launching them one by one takes longer than running
            use_graphs = on_gpu and world.size == 1 and train.accumulation == 1
            torch.compiler.reset()  # of one function it keeps eight models; further ones would run slowly
            self.compiled = torch.compile(self.spread, mode="reduce-overhead" if use_graphs else "default")
        self.optimizer = make_optimizer(self.model, train, fused=on_gpu)
        self.checkpoints = Checkpoints(self.folder)
        super().__init__(lambda number: self._train_step())
        self.best_loss, self.best_step = math.inf, 0
        self.evaluations_since_best = 0
        self.peak_flops = peak_flops(self.device)

    def run(self) -> dict[str, Any]:
        """Train to the end, or until SIGINT or SIGTERM stops it after a step; returns where it got to."""
        train = self.config.train
        with stop_on_signal() as signalled, self._loggers() as record:
            started, marked = self.step, (self.step, self.seconds)
            for step in self.steps(train.max_steps):
                is_last = step == train.max_steps
                if step > started:
                    if step % train.log_interval == 0 or step == 1 or is_last:
                        value, now = self._finite_loss(), (step, self.seconds)
                        record({"train/loss": value, **self._speed(now[0] - marked[0], now[1] - marked[1])})
                        marked = now
                    if step % train.eval_interval == 0 or is_last:
                        self._finite_loss()
                        record(self._evaluate())
                    if step % train.checkpoint_interval == 0 or is_last:
                        self._finite_loss()
                        self.save("last")
                if (stop := self.world.any(signalled())) or self._out_of_patience():
                    break
            if stop and not self.world.from_leader(lambda: self.checkpoints.has("last", self.step)):
                if self.step > started:
                    self._finite_loss()
                self.save("last")
            return self.summary(interrupted=stop)

    def resume(self) -> bool:
        """Go on from the last checkpoint of this run, if there is one."""
        state: dict[str, Tensor] = {}
        training: dict[str, Tensor] = {}

        def read() -> dict[str, Any] | None:
            folder = self.checkpoints.newest("last")
            if folder is None:
                return None
            saved = GPT.from_pretrained(folder)
            if RunConfig.from_json((folder / "run.json").read_text()).model != self.config.model:
                raise ValueError(
                    f"{folder} holds another model; resume with its own settings or start a new run"
                )
            if load_tokenizer(folder / "tokenizer.json") != self.dataset.tokenizer:
                raise ValueError(
                    f"the text has other characters or words than the one that {folder} learned: its numbers "
                    "would mean something else. Resume with that text, or start a new run"
                )
            state.update(saved.state_dict())
            tensors, progress = read_training(folder)
            training.update(tensors)
            return {"folder": str(folder), "progress": progress}

        found = self.world.from_leader(read)
        if found is None:
            return False
        progress = found["progress"]
        try:
            spread_state(self.model, self.optimizer, self.world, state, training)
            self.batches.load_state_dict(progress["batches"])
            self.step, self.seconds = progress["step"], progress["seconds"]
            self.best_loss = math.inf if progress["best_loss"] is None else progress["best_loss"]
            self.best_step = progress["best_step"]
            self.evaluations_since_best = progress["evaluations_since_best"]
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the run cannot go on from {found['folder']}: {error!r}") from error
        return True

    def _with_scale(self) -> GPTConfig:
        """The model's configuration, with the factor of the warm-up in its scale."""
        config = self.model.config_now()
        factor = next((layer.scale_factor for layer in self.model.apn_layers().values()), None)
        if factor is None or factor == 1:
            return config
        by = float(factor)
        own = {
            number: settings | {"scale": by * settings["scale"]} if "scale" in settings else settings
            for number, settings in config.per_layer.items()
        }
        apn = dataclasses.replace(config.apn, scale=by * config.apn.scale)
        return dataclasses.replace(config, apn=apn, per_layer=own)

    def save(self, kind: str) -> Path:
        state = gather_model(self.model)
        training = gather_training(self.model, self.optimizer, self.world) if kind == "last" else {}

        def fill(folder: Path) -> None:
            # a reader gets the model as it is now: the factor of the warm-up is not set again
            self.model.save_pretrained(folder, state=state, config=self._with_scale())
            self.dataset.tokenizer.save(folder / "tokenizer.json")
            (folder / "run.json").write_text(self.config.to_json())
            if kind == "last":
                progress = {
                    "step": self.step,
                    "best_loss": finite(self.best_loss),
                    "best_step": self.best_step,
                    "evaluations_since_best": self.evaluations_since_best,
                    "seconds": self.seconds,
                    "batches": self.batches.state_dict(),
                }
                write_training(folder, training, progress)

        return self.world.from_leader(lambda: self.checkpoints.save(kind, self.step, fill))

    def summary(self, interrupted: bool = False) -> dict[str, Any]:
        return {
            "step": self.step,
            "best_val_loss": finite(self.best_loss),
            "best_val_ppl": finite(perplexity(self.best_loss)),
            "best_step": self.best_step,
            "seconds": self.seconds,
            "interrupted": interrupted,
            "parameters": self.model.num_parameters(),
        }

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.config.train.precision)

    def _train_step(self) -> Tensor:
        train = self.config.train
        if train.scale_warmup_steps:
            for layer in self.model.apn_layers().values():
                layer.set_scale_factor(warmup_factor(self.step, train.scale_warmup_steps))
        self.spread.train()
        if self.device.type == "cuda":  # elsewhere there are no graphs, and asking imports a compiler
            torch.compiler.cudagraph_mark_step_begin()
        inputs, targets = (part.to(self.device, non_blocking=True) for part in next(self.batches))
        total = torch.zeros((), device=self.device)

        def objectives() -> Iterator[Tensor]:
            pieces = zip(inputs.chunk(train.accumulation), targets.chunk(train.accumulation), strict=True)
            for number, (x, y) in enumerate(pieces, 1):
                average_gradients(self.spread, number == train.accumulation)
                with self.autocast():
                    loss, objective = self._losses(x, y)
                yield objective / train.accumulation
                total.add_(loss.detach() / train.accumulation)

        rate, parameters = learning_rate(train, self.step), self.model.parameters()
        descend(self.optimizer, objectives(), rate, clip=parameters, clip_norm=train.clip_norm)
        return total

    def _losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy, and what is minimised: cross entropy plus the regularisers that were asked for."""
        train = self.config.train
        regularised = bool(train.balance_weight or train.entropy_weight)
        if not regularised:
            loss = F.cross_entropy(self.compiled(x).flatten(0, 1).float(), y.flatten())
            return loss, loss
        logits, stats = self.compiled(x, return_stats=True)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        objective = loss
        for layer in stats.values():
            objective = (
                objective + train.balance_weight * layer.balance - train.entropy_weight * layer.entropy
            )
        return loss, objective

    def _evaluate(self) -> dict[str, float]:
        loss = evaluate(self.model, self.dataset.val, autocast=self.autocast, world=self.world)
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.evaluations_since_best = loss, self.step, 0
            self.save("best")
        else:
            self.evaluations_since_best += 1
        return {"val/loss": loss, "val/ppl": perplexity(loss), **self._routing()}

    def _out_of_patience(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.evaluations_since_best >= patience

    def _routing(self) -> dict[str, float]:
        """Routing health of every routed layer on a piece of the validation text."""
        piece = self.dataset.val[: 8 * self.config.model.context + 1]
        values: dict[str, float] = {}
        for layer, stats in routing(self.model, piece, autocast=self.autocast).items():
            values |= monitor.summary(stats, prefix=f"apn/{layer}/")
        return values

    def _speed(self, steps: int, seconds: float) -> dict[str, float]:
        tokens = steps * self.config.train.batch_size * self.config.model.context / max(seconds, 1e-9)
        values = {
            "train/lr": learning_rate(self.config.train, self.step - 1),
            "train/tokens_per_second": tokens,
        }
        if self.peak_flops:
            values["train/mfu"] = tokens * self.flops_per_token / self.peak_flops
        return values

    def _finite_loss(self) -> float:
        """The loss of the last step in all processes; reading it waits until it is known."""
        with self.timed():
            value = float(self.world.mean(self.loss))
        if not math.isfinite(value):
            newest = self.checkpoints.newest("last")
            raise NotFiniteLoss(
                f"the loss is {value} at step {self.step}; "
                + (f"the last good state is {newest}" if newest else "no checkpoint was written yet")
                + ". Lower train.learning_rate, or raise train.warmup_steps"
            )
        return value

    @contextmanager
    def _loggers(self) -> Iterator[Callable[[dict[str, float]], None]]:
        """Yield loggers: metrics.jsonl always, TensorBoard where installed, and the caller's own report."""
        if not self.world.is_leader:
            yield lambda values: None
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "config.json", self.config.to_json())
        path = self.folder / "metrics.jsonl"
        # records after the checkpoint belong to a future that did not happen
        records = read_jsonl(path, "step", self.step) if self.step else []
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        try:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.step + 1)
        except ImportError:
            log.info("tensorboard is not installed: metrics go to %s only", path)
            board = None
        with path.open("a") as file:

            def record(values: dict[str, float]) -> None:
                entry = {"step": self.step, **finite(values)}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                for name, value in values.items():
                    if board is not None:
                        board.add_scalar(name, value, self.step)
                self.report(entry)

            try:
                yield record
            finally:
                if board is not None:
                    board.close()


def make_optimizer(model: nn.Module, train: TrainConfig, *, fused: bool = False) -> torch.optim.AdamW:
    """AdamW that decays matrices; norms, biases, gates and prototypes have no reason to shrink.

    Of a parameter with a sparse gradient it moves the rows that the gradient has.
    """
    undecayed = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    for module in model.modules():
        if isinstance(module, APN):
            undecayed |= {
                p
                for name, p in module.named_parameters()
                if ROLES[name] in ("gates", "prototypes") or name == "codebooks"
            }
    groups = [
        {"params": [p for p in model.parameters() if p not in undecayed], "weight_decay": train.weight_decay},
        {"params": [p for p in model.parameters() if p in undecayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, train.beta2), fused=fused)
    optimizer.register_step_pre_hook(move_rows)
    return optimizer


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to the minimum at the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / (train.warmup_steps + 1)
    done = (step - train.warmup_steps) / max(1, train.max_steps - train.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.min_learning_rate + height * (train.learning_rate - train.min_learning_rate)


def peak_flops(device: torch.device) -> float | None:
    """The device's matrix rate if we know it; MFU is not reported otherwise."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for key, rate in PEAK_FLOPS.items() if key in name), None)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a polite stop at the next step; a second SIGINT stops at once."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        log.warning("stopping after this step; the state will be saved")

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone gets signals
        previous = {}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
