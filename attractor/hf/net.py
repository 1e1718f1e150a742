"""Retrofit: a Hugging Face model whose FFNs have APN layers, and the two functions that make one."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from attractor.config import APNConfig
from attractor.hf import files
from attractor.hf.build import Built, Options, adds_nothing, build, weight_of, width
from attractor.hf.files import ModeName
from attractor.hf.find import places_at
from attractor.hf.site import Site, is_retrofitted, is_site
from attractor.layer import APN, RoutingStats

log = logging.getLogger("attractor")

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def retrofit(
    model: Any, config: APNConfig | None = None, *, name: str = "default", **options: Unpack[Options]
) -> "Retrofit":
    """Give a Hugging Face causal language model APN layers. The model's own modules stay what they are.

    `mode="beside"` adds an APN layer to each FFN, whose update is zero until it learns: the logits stay the
    same. `mode="replace"` distils each FFN into an APN layer on a `sample` of text. All options are in
    `attractor.hf.build.Options`; `name` distinguishes several retrofits of one model.

    >>> import torch
    >>> from attractor import APNConfig, retrofit
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> base = LlamaForCausalLM(config).eval()
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> before = base(tokens).logits
    >>> net = retrofit(base, APNConfig(num_patches=8, rank=4))
    >>> list(net.apn_layers()), torch.equal(net(tokens).logits, before)
    ([0, 1], True)

    A model whose FFNs are not found is a ValueError that says how to name them; an unknown option is a
    TypeError.
    """
    net = Retrofit(model)
    net.add(name, config, **options)
    return net


def load_retrofit(
    base: Any, folder: str | Path, *, name: str = "default", backend: str = "auto"
) -> "Retrofit":
    """Read a saved retrofit onto its `base`: a model, or a `Retrofit` that is to hold this one too.

    `folder` is what `save_pretrained` wrote, or the Trainer of transformers: its `save_model()` or one of its
    checkpoints. Of several retrofits in one of these, the one called `name` is read.

    >>> import tempfile, torch
    >>> from attractor import APNConfig, load_retrofit, retrofit
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> base = LlamaForCausalLM(config).eval()
    >>> tokens, folder = torch.tensor([[1, 2, 3]]), tempfile.mkdtemp()
    >>> retrofit(base, APNConfig(num_patches=8, rank=4)).save_pretrained(folder)
    >>> again = LlamaForCausalLM(config).eval()
    >>> _ = again.load_state_dict(base.state_dict())
    >>> torch.equal(load_retrofit(again, folder)(tokens).logits, base(tokens).logits)
    True

    A folder that is damaged, or was made over another base, is a ValueError, and nothing has changed then.
    """
    net = base if isinstance(base, Retrofit) else Retrofit(base)
    net._check_new(name)
    saved = files.read(folder, width(net.model), backend, name)
    saved.check_base(net.model)
    known = {path for path, _ in net.model.named_modules()}
    names = [*saved.layers, *([] if saved.source is None else [saved.source])]
    if absent := [path for path in (*names, *saved.attention) if path not in known]:
        raise ValueError(f"{folder} has a layer for {absent[0]}, which the base has not. Nothing was changed")
    places = places_at(net.model, names)
    source = None if saved.source is None else places.pop(0)
    if source is not None and source.name != saved.source:
        raise ValueError(f"{folder} has a layer before {saved.source}, which it reads. Nothing was changed")
    layers = [(place, saved.layers[place.name]) for place in places]
    for place, layer in layers:
        layer.to(weight_of(net.model, place).device)
    net._take(name, Built(saved.mode, layers, source, saved.attention))
    return net


class Retrofit(nn.Module):
    """A model and the named retrofits it can use, one at a time or none.

    Calls and attributes are the model's. Its state dict is that of the APN layers alone, and describes them:
    the base is frozen, and lies elsewhere already.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_diff_dict"):
            raise ValueError(f"a {type(model).__name__} cannot be retrofitted: give a Hugging Face model")
        if isinstance(model, Retrofit) or is_retrofitted(model):
            raise ValueError(
                "this model is retrofitted already: add() another retrofit to it, or unload() it"
            )
        self.model: Any = model
        self.training = model.training
        self.retrofits = nn.ModuleDict()  # name -> number of a block -> APN layer
        self.modes: dict[str, ModeName] = {}
        self.errors: dict[str, dict[int, float]] = {}  # name -> block -> relative error of a distilled layer
        self.sites: dict[int, Site] = {}
        self.sources: dict[str, int] = {}  # name -> block whose input the layers read in place of their own
        self.attention: dict[str, tuple[str, ...]] = {}  # name -> modules whose results they read beside it
        self.active: str | None = None
        self._found = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.register_state_dict_post_hook(_describe_without_base)
        self.register_load_state_dict_pre_hook(_check_description)
        self.register_load_state_dict_post_hook(_miss_no_base)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or name.startswith("__"):
                raise
            return getattr(self.model, name)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """The model's own forward; the first arguments are spelled out because Trainer reads them here."""
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        return self.model(**{name: value for name, value in named.items() if value is not None}, **others)

    # --- retrofits by name

    def add(self, name: str, config: APNConfig | None = None, **options: Unpack[Options]) -> None:
        """Build another retrofit and use it. What the options mean is in `build.Options`."""
        self._check_new(name)
        if config is not None and not isinstance(config, APNConfig):
            raise TypeError(f"config is a {type(config).__name__}: give an APNConfig")
        with self.using(None):
            built = build(self.model, APNConfig() if config is None else config, **options)
        self._take(name, built)

    def use(self, name: str | None) -> None:
        """Switch to a retrofit: its APN layers can be trained, all else is frozen. None is the base."""
        self._switch(name)
        self.requires_grad_(False)
        for layer in self.apn_layers().values():
            layer.requires_grad_(True)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Another retrofit, or none, for a while; what can be trained stays as it is."""
        before = self.active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before if before in self.modes else None)

    def drop(self, name: str) -> None:
        """Forget a retrofit; if it is in use, the base is used from now on."""
        self._check_known(name)
        if self.active == name:
            self.use(None)
        del self.retrofits[name], self.modes[name], self.errors[name]
        self.sources.pop(name, None)
        self.attention.pop(name, None)

    def apn_layers(self, name: str | None = None) -> dict[int, APN]:
        """Number of the block -> APN layer, of a retrofit or of the one in use."""
        name = self.active if name is None else self._check_known(name)
        layers = nn.ModuleDict() if name is None else cast(nn.ModuleDict, self.retrofits[name])
        return {int(number): cast(APN, layer) for number, layer in layers.items()}

    @contextmanager
    def recording(self, shape: torch.Size | None) -> Iterator[dict[int, RoutingStats]]:
        """Afterwards the dict holds what each router did with tokens of this shape, (B, T); None: nothing."""
        found: dict[int, RoutingStats] = {}
        for site in self.sites.values():
            site.recording = shape
        try:
            yield found
        finally:
            for number, site in self.sites.items():
                if site.stats is not None:
                    found[number] = site.stats
                site.recording = site.stats = None

    # --- training

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def print_trainable_parameters(self) -> None:
        trainable = sum(parameter.numel() for parameter in self.trainable_parameters())
        total = sum(parameter.numel() for parameter in self.parameters())
        print(f"trainable: {trainable:,} of {total:,} parameters ({trainable / total:.2%})")

    # --- the end

    def save_pretrained(
        self, folder: str | Path, *, name: str | None = None, about: Mapping[str, str] | None = None
    ) -> None:
        """Write a retrofit (default: the one in use); `load_retrofit(base, folder)` reads it.

        `about` joins the model card: `{"data": "German law", "perplexity": "9.47"}`.
        """
        if not self.apn_layers(name):
            raise ValueError(f"no retrofit is in use; name one of {sorted(self.modes)}")
        files.write(folder, self.model, *self._described(name or cast(str, self.active)), about)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "Retrofit":
        """Read a saved retrofit with its base, which is loaded from where the folder says, with `options`."""
        from attractor.hf.auto import load_with_base

        return load_with_base(folder, **options)

    def unload(self) -> Any:
        """The model as it was, with its own modules, and every `requires_grad` as it was found."""
        for site in self.sites.values():
            site.check_removable()
        self._switch(None)
        for site in self.sites.values():
            site.remove()
        for name, parameter in self.model.named_parameters() if self.sites else ():
            parameter.requires_grad_(self._found.get(name, True))
        self.sites, self.modes, self.errors, self.retrofits = {}, {}, {}, nn.ModuleDict()
        self.sources, self.attention = {}, {}
        return self.model

    def merge(self) -> Any:
        """The model without APN layers and with the same logits: possible only while they add nothing.

        Which patches a token gets depends on the token, and so does every gate: no weights of a dense FFN
        compute the same. Even one patch with a constant gate is a linear map beside the FFN, which has no
        room for one between its two matrices.
        """
        layers = [layer for name in self.modes for layer in self.apn_layers(name).values()]
        if "replace" not in self.modes.values() and all(map(adds_nothing, layers)):
            return self.unload()
        raise ValueError(
            "APN layers cannot be merged: what a token gets depends on which patches it selects, and no "
            "weights of the FFN compute that. Keep the retrofit (save_pretrained), or drop it (unload)"
        )

    # --- inside

    def _check_known(self, name: str) -> str:
        if name not in self.modes:
            raise ValueError(f"there is no retrofit {name!r}; there are {sorted(self.modes)}")
        return name

    def _check_new(self, name: str) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name) or hasattr(nn.ModuleDict(), name):
            raise ValueError(f"{name!r} cannot name a retrofit: use up to 64 letters, digits, '_' and '-'")
        if name in self.modes:
            raise ValueError(f"there is a retrofit {name!r} already; drop it first, or choose another name")

    def _described(self, name: str) -> tuple[dict[str, APN], ModeName, str | None, tuple[str, ...]]:
        """A retrofit as files describe it: layers by the names of their places, and what they read."""
        layers = self.apn_layers(name)
        if any(layer.scale_factor is not None and layer.scale_factor != 1 for layer in layers.values()):
            log.warning("the scale of the updates is being warmed up: what is saved has it whole")
        places = {self.sites[number].place.name: layer for number, layer in layers.items()}
        source = self.sites[self.sources[name]].place.name if name in self.sources else None
        return places, self.modes[name], source, self.attention.get(name, ())

    def _description(self, name: str) -> Tensor:
        numbers = {self.sites[number].place.name: number for number in self.apn_layers(name)}
        return files.description(self.model, *self._described(name), numbers)

    def _switch(self, name: str | None) -> None:
        layers = {} if name is None else self.apn_layers(name)
        source = None if name is None else self.sources.get(name)
        for number, site in self.sites.items():
            site.apn = layers.get(number)
            site.replaces = name is not None and self.modes[name] == "replace"
            site.source = None if source is None else self.sites[source]
            site.is_source, site.input = number == source, None
            heard = self.attention.get(name, ()) if name is not None and site.is_source else ()
            site.listen([self.model.get_submodule(path) for path in heard])
        self.active = name

    def _take(self, name: str, built: Built) -> None:
        """The layers are complete: only now something changes."""
        places = [place for place, _ in built.layers] + ([] if built.source is None else [built.source])
        for place in places:
            known = self.sites.get(place.number)
            if known is not None and known.place.name != place.name:
                raise ValueError(
                    f"block {place.number} has retrofits at {known.place.name}, so none at {place.name}: "
                    "unload first. Nothing was changed"
                )
            if known is None and any(map(is_site, place.modules)):
                raise ValueError(f"{place.name} has a retrofit of another owner. Nothing was changed")
        for place in places:
            if place.number not in self.sites:
                self.sites[place.number] = Site(place)
        if built.source is not None:
            self.sources[name] = built.source.number
            self.attention[name] = built.attention
        held = nn.ModuleDict({str(place.number): layer for place, layer in built.layers})
        self.retrofits[name] = held.train(self.model.training)
        self.modes[name], self.errors[name] = built.mode, built.errors
        self.use(name)


def _describe_without_base(net: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """The state dict alone, which is what a Trainer writes, has all that `load_retrofit` needs."""
    for key in [key for key in state if key.startswith(f"{prefix}model.")]:
        del state[key]
    for name in cast(Retrofit, net).modes:
        state[f"{prefix}retrofits.{name}.description"] = cast(Retrofit, net)._description(name)


def _check_description(net: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Tensors can fit and mean something else; state dicts of earlier releases do not describe themselves."""
    for name in cast(Retrofit, net).modes:
        found = state.pop(f"{prefix}retrofits.{name}.description", None)
        if found is not None:
            files.check_description(found, cast(Retrofit, net)._description(name))


def _miss_no_base(net: nn.Module, incompatible: Any) -> None:
    base = {f"model.{key}" for key in cast(Retrofit, net).model.state_dict()}

    def is_of_base(key: str) -> bool:  # a module that holds us puts its own name before
        parts = key.split(".")
        return any(".".join(parts[start:]) in base for start in range(len(parts)))

    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not is_of_base(key)]
