"""What readers get while a model learns: copies of sources, or versions of the layer with lessons.

A source is named tensors and JSON, and readers keep copies of it that are brought up to date in turn:

    with held.learner.attempt() as undo:
        before = tensors_of(held)             # name -> the live tensor: weights, moments, usage
        held.learner.observe(text)
        delta = delta_of(before, tensors_of(held), undo)
    frames.after(delta)                       # readers get a copy that has this delta too

Of lessons they get a bank of patches that versions share, and radii of their own:

    readers = Readers(net, layer, context)
    version = readers.after(layer, owners, patches)   # a model that is never changed again

A version is a vector of radii: a patch that is closed in it does not exist for it. So a lesson is written
into patches that no living version has open, and costs its readers nothing but the vector. Where a patch that
is needed is still open somewhere, or the bank has grown, the new version gets a bank of its own.
"""

import copy
import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from attractor import ops
from attractor.continual import state as states
from attractor.continual.calibrate import CLOSED
from attractor.continual.delta import Delta
from attractor.continual.guarded import Source
from attractor.hf.causal import CausalConfig, CausalLM
from attractor.hf.teachable import NAME
from attractor.layer import APN, PATCH_ROLES, ROLES
from attractor.lm import TrainableModel
from attractor.serve.decode.fixed import LONGEST, CopiedPatches, FixedPasses, FixedRows
from attractor.serve.decode.sequences import Found
from attractor.serve.learning.canaries import CLOSE

log = logging.getLogger("attractor")

NUMBERS = itertools.count()
"""Banks and versions are numbered: a copy knows by the number whether it is of the same one."""
WEIGHTS = "weights/"
MOST_FRAMES = 16
"""Copies of a source that readers may hold: each is as large as its banks."""


def tensors_of(held: Source) -> dict[str, Tensor]:
    """Everything that makes this source what it is, by name; the tensors themselves, not copies."""
    tensors: dict[str, Tensor] = {f"{WEIGHTS}{name}": p for name, p in held.branch.parameters().items()}
    return tensors | {f"state/{name}": value for name, value in states.tensors_of(held.learner).items()}


def fields_of(held: Source) -> dict[str, Any]:
    """The rest of it: counters, as JSON."""
    return {**states.counters_of(held.learner), "lessons": held.version}


def fill(held: Source, delta: Delta, fields: dict[str, Any]) -> None:
    """Make a new source what was kept of it."""
    tensors = tensors_of(held)
    now = dict(tensors)
    delta.apply(now)
    if wrong := [name for name, tensor in tensors.items() if now[name] is not tensor]:
        raise ValueError(
            f"{wrong[0]} was kept as {tuple(now[wrong[0]].shape)} and is {tuple(tensors[wrong[0]].shape)}"
        )
    own = {name.removeprefix("state/"): x for name, x in tensors.items() if name.startswith("state/")}
    states.restore(held.learner, {**fields, "history": [], "notes": {}, "source": None}, own)
    held.version = fields["lessons"]


def patches_of(weights: Delta, layer: int) -> list[int]:
    """The patches of a layer that a delta of weights changes in anything."""
    found: set[int] = set()
    part = weights.under(f"blocks.{layer}.ffn.")
    for name, (numbers, _) in part.rows.items():
        found |= set(numbers.tolist()) if ROLES[name] in PATCH_ROLES else set()
    for name, value in part.whole.items():
        found |= set(range(len(value))) if ROLES[name] in PATCH_ROLES else set()
    return sorted(found)


class Frame:
    """A copy of a source's path for readers, which is not written while a publication uses it."""

    def __init__(self, held: Source) -> None:
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in held.branch.model.parameters()}
        own = held.branch.parameters()
        for parameter in own.values():
            shared[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        # a deep copy takes what its memo holds
        self.model: TrainableModel = copy.deepcopy(held.branch.model, dict(shared)).eval()
        self.own: dict[str, Tensor] = {name: shared[id(p)].data for name, p in own.items()}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.behind = Delta()  # what happened to the source since it was copied

    def catch_up(self) -> None:
        self.behind.apply(self.own)
        self.behind = Delta()


class Frames:
    """The copies of one source: the newest is what readers get, others are brought up to date in turn."""

    def __init__(self, held: Source) -> None:
        self.held = held
        self.all = [Frame(held)]
        self.newest = self.all[0]

    @property
    def crowded(self) -> bool:
        """Whether so many versions are being read that one more would be a copy too many."""
        return sum(bool(frame.users) for frame in self.all) >= MOST_FRAMES

    def after(self, weights: Delta) -> Frame:
        """A frame of the source as it is now; no frame that somebody reads is written."""
        for frame in self.all:
            frame.behind = frame.behind.merge(weights)
        idle = [frame for frame in self.all if not frame.users and frame is not self.newest]
        if idle:
            idle[0].catch_up()
            self.newest = idle[0]
            self.all = [f for f in self.all if f.users or f is self.newest or f is idle[-1]]
        else:
            self.newest = Frame(self.held)
            self.all.append(self.newest)
        return self.newest


def reading_copy(base: TrainableModel) -> TrainableModel:
    """The same weights in modules of their own: a thread that reads shares no switch with one that learns."""
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()}).eval()


class ReadingLayer(APN):
    """The layer of lessons for readers: it says which patches acted, and rows may have radii of their own.

    Prototypes are unit vectors. Hardly any token lies in a basin. So one product of matrices tells first
    which do, and their patches are all that the rest of the mathematics sees.
    """

    radii: Tensor | None = None  # (B, K) where the rows of a pass are of different versions
    everywhere: Tensor | None = (
        None  # (B, K) likewise, where the shape of a pass may not depend on what it reads
    )
    indices: Tensor  # (n) of the last pass, -1 where no patch acted
    weights: Tensor  # (n)

    def forward(self, x: Tensor, *, return_stats: bool = False) -> Any:
        tokens = self._prepare(x)
        if self.everywhere is not None:
            return self._forward_everywhere(tokens, self.everywhere).reshape(*x.shape[:-1], self.dim)
        assert self.radius is not None
        radius = self.radius
        if self.radii is not None:  # as every token of its row has it
            radius = self.radii.repeat_interleave(len(tokens) // len(self.radii), 0)
        depth, patch = (self._directions(tokens) @ self.prototypes.T - radius).max(1)
        inside = (depth > -CLOSE).nonzero()[:, 0]
        update = tokens.new_zeros(len(tokens), self.dim)
        self.indices = torch.full_like(patch, -1)
        self.weights = torch.zeros_like(depth)
        if len(inside):
            near = patch[inside].unique()
            edges = radius[near] if self.radii is None else radius[inside][:, near]
            banks = tuple(None if bank is None else bank[near] for bank in self._banks())
            output = self._compute(tokens[inside], banks, edges, "reference")
            acted, found = output.indices[:, 0] >= 0, output.indices[:, 0].clamp(min=0)
            self.indices[inside] = near[found.long()].masked_fill(~acted, -1)
            self.weights[inside] = output.weights[:, 0].to(self.weights)
            update[inside] = output.update
        return update.reshape(*x.shape[:-1], self.dim)

    def _forward_everywhere(self, tokens: Tensor, radii: Tensor) -> Tensor:
        """The same with all patches for all tokens: nothing waits for the GPU, and every shape is known."""
        steps = len(tokens) // len(radii)
        edges = radii[:, None].expand(-1, steps, -1).flatten(0, 1)
        output = self._compute(tokens, self._banks(), edges, "reference")
        self.indices, self.weights = output.indices[:, 0], output.weights[:, 0]
        return output.update.masked_fill(self.indices[:, None] < 0, 0)


class Bank:
    """The patches of a layer as readers have them, and the lesson that each belongs to."""

    def __init__(self, layer: APN, owners: Sequence[int]) -> None:
        self.rows = {
            name: nn.Parameter(reading_rows(name, value).clone(), requires_grad=False)
            for name, value in layer.named_parameters()
            if ROLES[name] in PATCH_ROLES
        }
        self.owners = list(owners)
        self._name(range(len(owners)), slice(None), owners)
        self.number, self.written = next(NUMBERS), 0  # and how often patches were written
        self.versions: weakref.WeakSet[Version] = weakref.WeakSet()  # that have it

    def can_take(self, layer: APN, patches: Sequence[int]) -> bool:
        """Whether no living version has any of these patches open, and there are as many as in the layer."""
        if len(self.owners) != layer.num_patches:
            return False
        place = self._place(patches)
        return not any(bool((version.radius[place] < CLOSED).any()) for version in self.versions)

    @torch.no_grad()
    def take(self, layer: APN, owners: Sequence[int], patches: Sequence[int]) -> None:
        own, place = dict(layer.named_parameters()), self._place(patches)
        for name, value in self.rows.items():
            value[place] = reading_rows(name, own[name][place])
        self._name(patches, place, owners)
        self.written += 1

    def _place(self, patches: Sequence[int]) -> Tensor:
        """Where these patches are, on the device: a list would be sent there with every use."""
        return torch.tensor(list(patches), dtype=torch.long, device=self.rows["decoder"].device)

    def _name(self, patches: Sequence[int], place: Tensor | slice, owners: Sequence[int]) -> None:
        """Say which lesson these patches act for: none where nothing is added."""
        adds = (self.rows["decoder"][place] != 0).flatten(1).any(1).tolist()
        for patch, is_acting in zip(patches, adds, strict=True):
            self.owners[patch] = owners[patch] if is_acting else -1


def reading_rows(name: str, rows: Tensor) -> Tensor:
    """Rows of a bank as readers have them: directions are all that counts of prototypes."""
    return ops.unit(rows.detach()) if name == "prototypes" else rows.detach()


class Pool:
    """Passes of fixed shapes over one model. A batch has one of them to itself; prompts share another."""

    def __init__(self, model: CausalLM, layer: ReadingLayer | None = None) -> None:
        self.model, self.layer = model, layer
        self.works = True
        self._patches: CopiedPatches | None = None
        self._for_rows: list[FixedPasses] = []
        self._for_prompts: FixedPasses | None = None

    def lease(self, bank: "Bank | None") -> FixedRows | None:
        """Memory for a batch that reads these patches; None if the model takes no passes of fixed shapes."""
        patches = self._patches_for(bank)
        free = [passes for passes in self._for_rows if passes.is_free]
        fitting = [passes for passes in free if passes.patches is patches]
        if not fitting and (made := self._make(patches)) is not None:
            self._for_rows = [passes for passes in self._for_rows if passes not in free] + [made]
            fitting = [made]
        return fitting[0].lease() if fitting else None

    def for_prompts(self, bank: "Bank | None") -> FixedPasses | None:
        patches = self._patches_for(bank)
        if self._for_prompts is None or self._for_prompts.patches is not patches:
            self._for_prompts = self._make(patches)
        return self._for_prompts

    def _patches_for(self, bank: "Bank | None") -> CopiedPatches | None:
        """Memory for as many as these: all passes share it."""
        if bank is not None and (self._patches is None or self._patches.count != len(bank.owners)):
            self._patches = CopiedPatches(bank)
        return self._patches

    def _make(self, patches: CopiedPatches | None) -> FixedPasses | None:
        try:
            return FixedPasses(self.model, self.layer, patches) if self.works else None
        except Exception as error:
            log.warning("texts are written more slowly, without passes of fixed shapes: %s", error)
            self.works = False
            return None


class ReadingBase(CausalLM):
    """The base without lessons, for readers."""

    pool: Pool | None = None

    def rows_for(self) -> FixedRows | None:
        return None if self.pool is None else self.pool.lease(None)

    def read_together(
        self, models: Sequence["ReadingBase"], tokens: Tensor, cache: Any
    ) -> tuple[Tensor, Found]:
        done = read_fixed(self.pool, None, models, tokens, cache)
        return (self(tokens, cache=cache), [[] for _ in models]) if done is None else done


def read_fixed(
    pool: Pool | None, bank: "Bank | None", models: Sequence[Any], tokens: Tensor, cache: Any
) -> tuple[Tensor, Found] | None:
    """A pass of a fixed shape, where this can be one."""
    if isinstance(cache, FixedRows):
        return cache.passes.step(models, tokens, cache)
    if pool is None or cache is None or cache.length or len(tokens) > 1:
        return None
    if tokens.shape[1] > min(LONGEST, pool.model.config.context):
        return None
    passes = pool.for_prompts(bank)
    return None if passes is None else passes.read(models, tokens, cache)


class Readers:
    """One copy of a model's modules for all readers; the weights of the base are shared with the writer.

    On a GPU, and where `fixed` says so, passes have fixed shapes.
    """

    fixed = False

    def __init__(self, model: CausalLM, owners: Sequence[int]) -> None:
        (number, layer), *_ = model.apn_layers().items()
        self.with_lessons = cast(CausalLM, reading_copy(model))
        self.layer = reading_layer(layer)
        net = self.with_lessons.net
        cast(nn.ModuleDict, net.retrofits[NAME])[str(number)] = self.layer
        self.with_lessons.blocks = nn.ModuleDict()  # the writer's own layer, which would be kept alive
        self.base = ReadingBase(net, None, context=model.config.context)
        self.bank = Bank(layer, owners)
        self.pool: Pool | None = None
        if self.fixed or model.device.type == "cuda":
            self.pool, self.base.pool = Pool(self.with_lessons, self.layer), Pool(self.base)

    def after(self, layer: APN, owners: Sequence[int], patches: Sequence[int]) -> "Version":
        """The version that the writer's layer is now, in which these patches are new."""
        if self.bank.can_take(layer, patches):
            self.bank.take(layer, owners, patches)
        else:
            self.bank = Bank(layer, owners)
        assert layer.radius is not None
        version = Version(self, self.bank, layer.radius.clone())
        if layer.radius.device.type == "cuda":  # readers have a stream of their own
            torch.cuda.current_stream(layer.radius.device).synchronize()
        return version


class Version(nn.Module):
    """The model with the lessons of one version. Only the engine's thread reads with it."""

    def __init__(self, readers: Readers, bank: Bank, radius: Tensor) -> None:
        super().__init__()
        self._readers = readers
        self.bank, self.radius, self.number = bank, radius, next(NUMBERS)
        bank.versions.add(self)
        self.training = False

    @property
    def config(self) -> CausalConfig:
        return self._readers.base.config

    @property
    def device(self) -> torch.device:
        return self._readers.base.device

    def new_row(self) -> Any:
        return self._readers.base.new_row()

    def rows_for(self) -> FixedRows | None:
        pool = self._readers.pool
        return None if pool is None else pool.lease(self.bank)

    def forward(self, tokens: Tensor, *, cache: Any = None) -> Tensor:
        return self.read_together([self] * len(tokens), tokens, cache)[0]

    def read_together(
        self, versions: Sequence["Version"], tokens: Tensor, cache: Any
    ) -> tuple[Tensor, Found]:
        """Logits, a version for each row, all of one bank; and where lessons acted."""
        if (done := read_fixed(self._readers.pool, self.bank, versions, tokens, cache)) is not None:
            return done
        layer, bank = self._readers.layer, self.bank
        for name, rows in bank.rows.items():
            setattr(layer, name, rows)
        is_one = all(version is versions[0] for version in versions)
        layer.radius = versions[0].radius
        layer.radii = None if is_one else torch.stack([version.radius for version in versions])
        logits = self._readers.with_lessons(tokens, cache=cache)
        found: Found = [[] for _ in versions]
        acted = (layer.indices >= 0).nonzero()[:, 0]
        if len(acted):
            patches, weights = layer.indices[acted].tolist(), layer.weights[acted].tolist()
            for place, patch, weight in zip(acted.tolist(), patches, weights, strict=True):
                row, column = divmod(place, tokens.shape[1])
                if (lesson := bank.owners[patch]) >= 0:
                    found[row].append((column, lesson, weight))
        return logits, found


@torch.no_grad()
def reading_layer(layer: APN) -> ReadingLayer:
    """A layer for readers with the same whitening and encoder; its patches are set for each pass."""
    own = ReadingLayer.from_config(layer.dim, layer.config, backend=layer.backend).to(layer.prototypes)
    own.load_state_dict(layer.state_dict())
    return own.requires_grad_(False).eval()
