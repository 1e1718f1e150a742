"""An FFN that an APN layer stands beside, or in for.

The modules of the model stay where they are, under the names they have: only what calling them does changes,
and only until `remove`. So the model's own state dict, hash and files never know about APN layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attractor.hf.find import Place
from attractor.layer import APN, RoutingStats


class Site:
    """The place of an FFN. `apn` is the layer at work: beside it, or if it `replaces`, in its place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.apn: APN | None = None
        self.replaces = False
        self.source: Site | None = None  # an earlier site, whose input the layer reads in place of its own
        self.is_source = False
        self.input: Tensor | None = None  # what a source was given last, after what attention added before
        self.added: list[Tensor] = []  # by attention whose results are read too, in the order of its blocks
        self.hooks: list[Any] = []
        self.first: nn.Module | None = None  # of the modules that are listened to
        self.recording: torch.Size | None = None  # shape (B, T) of the tokens whose routing is to be kept
        self.stats: RoutingStats | None = None
        self.found = [vars(module).get("forward") for module in place.modules]  # another library's, if any
        self.ours = [self.forward, *[pass_on] * (len(place.modules) - 1)]
        for module, forward in zip(place.modules, self.ours, strict=True):
            _call(module, forward)

    def check_removable(self) -> None:
        if [vars(module).get("forward") for module in self.place.modules] != self.ours:
            raise ValueError(
                f"another library changed what calling {self.place.name} does since it was retrofitted: undo "
                "that first. Nothing was changed"
            )

    def remove(self) -> None:
        for module, found in zip(self.place.modules, self.found, strict=True):
            if found is None:
                del module.forward
            else:
                _call(module, found)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.is_source:
            (given,) = check_arguments(self.place, arguments[:1])
            self.input = self._beside_attention(given) if self.hooks else given
        if self.apn is None:
            return self.ffn(*arguments, **options)
        hidden, *residuals = check_arguments(self.place, arguments if self.replaces else arguments[:1])
        if self.source is not None:
            hidden = self.source.hand_over(hidden)
        update = self._update(self.apn, hidden)
        if self.replaces:
            for residual in residuals:  # Bloom's FFN is given the residual stream, and adds it
                update = update + residual
            return update
        output = self.ffn(*arguments, **options)
        if isinstance(output, tuple):  # a mixture of experts that returns its routing too
            return self._sum(output[0], update), *output[1:]
        return self._sum(output, update)

    def listen(self, attention: Sequence[nn.Module]) -> None:
        """Let a source hand over what these modules add, beside what it is given."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = [module.register_forward_hook(self._keep) for module in attention]
        self.first = attention[0] if attention else None
        self.added = []

    def _keep(self, module: nn.Module, given: Any, output: Any) -> None:
        if module is self.first:  # a call that was interrupted may have left something
            self.added = []
        self.added.append(output[0] if isinstance(output, tuple) else output)

    def _beside_attention(self, given: Tensor) -> Tensor:
        added, self.added = self.added, []
        if len(added) != len(self.hooks) or any(part.numel() != given.numel() for part in added):
            raise ValueError(
                f"attention before {self.place.name} did not add {len(self.hooks)} tensors of shape "
                f"{tuple(given.shape)}: layers cannot read from it"
            )
        return torch.cat([*(part.reshape(given.shape) for part in added), given], -1)

    def hand_over(self, hidden: Tensor) -> Tensor:
        """What this site was given, to a later one that was given `hidden` in the same call of the model."""
        given = self.input
        if given is None or given.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"{self.place.name} was not called before the layer that reads what it is given")
        return given.to(hidden.device)

    def ffn(self, *arguments: Any, **options: Any) -> Any:
        """The FFN that stood here before."""
        (first, found), *rest = zip(self.place.modules, self.found, strict=True)
        output = _original(first, found)(*arguments, **options)
        for module, found in rest:
            output = _original(module, found)(output)
        return output

    def _sum(self, output: Any, update: Tensor) -> Tensor:
        output = check_output(self.place, output)
        if output.numel() != update.numel():
            raise ValueError(
                f"{self.place.name} is given {tuple(update.shape)} and returns {tuple(output.shape)}: no APN "
                "layer can stand beside it. Name another module"
            )
        return output + update.to(output.dtype).reshape(output.shape)

    def _update(self, apn: APN, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] != apn.read_dim or not hidden.is_floating_point():
            raise ValueError(
                f"{self.place.name} is given {tuple(hidden.shape)} of {hidden.dtype}, and hidden states have "
                f"width {apn.read_dim}: name another module"
            )
        tokens = hidden.to(apn.encoder.dtype)
        if self.recording is None:
            return apn(tokens).to(hidden.dtype)
        tokens = tokens.reshape(*self.recording, -1)  # some models hand over (B * T, dim)
        update, self.stats = apn(tokens, return_stats=True)
        return update.reshape(*hidden.shape[:-1], apn.dim).to(hidden.dtype)


def check_arguments(place: Place, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Hidden states, and beside them at most residuals, which an FFN adds to its output."""
    if not arguments or any(getattr(given, "shape", ()) != arguments[0].shape for given in arguments):
        raise ValueError(
            f"{place.name} is not given hidden states and at most residuals: name another module"
        )
    return arguments


def check_output(place: Place, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{place.name} returns a {type(output).__name__}, and an APN layer a tensor: neither can they be "
            "added nor one replace the other. Name another module"
        )
    return output


def pass_on(hidden: Tensor) -> Tensor:
    """What the later pieces of a split FFN do: the first one has done everything."""
    return hidden


def _original(module: nn.Module, found: Callable[..., Any] | None) -> Callable[..., Any]:
    """A property, because a bound method would be pickled as what stands in its place at the time."""
    return found if found is not None else partial(type(module).forward, module)


def is_site(module: nn.Module) -> bool:
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), Site)


def _call(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 (a method for mypy)


def is_retrofitted(model: nn.Module) -> bool:
    return any(map(is_site, model.modules()))
