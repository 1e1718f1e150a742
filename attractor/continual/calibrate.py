"""What ordinary text looks like to a layer with basins, so that lessons can stay out of its way.

    calibration = Calibration.fit(activations)  # (windows, time, dim): what the layer reads on background
    calibration.install(layer)                  # its whitening
    calibration.nearest(keys)                   # how close does background come to these directions?
    calibration.touched(layer)                  # the share of held-out background that enters a basin

Directions are compared after whitening by the covariance of background activations, shrunk towards its mean:
without it a few large channels dominate every cosine (docs/math.md, Basins).
"""

import dataclasses
import math

import torch
from torch import Tensor

from attractor import ops
from attractor.config import check_number, check_size
from attractor.layer import APN

CLOSED = 2.0
"""A radius that no cosine exceeds: the patch never acts."""
CONSTANT = 1.2784645
"""u * sigmoid(u) = 1 here: the code of a patch that reads the constant channel alone is 1."""


@dataclasses.dataclass(frozen=True)
class Touched:
    """How much background text enters a basin."""

    tokens: float
    """The share of held-out tokens that some patch acts on."""
    windows: float
    """The share of held-out windows with such a token: all others are the base's, to the bit."""
    windows_at_most: float
    """An upper bound on the second share in new text of the same kind, right with a probability of 95 %.

    It assumes nothing of the text but that windows are drawn alike (Clopper and Pearson)."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Whitening, and whitened background directions: some to choose radii by, some held out."""

    whitening: Tensor  # (width of what is read, d)
    shift: Tensor  # (d)
    keys: Tensor  # (n, d) unit vectors, in float16
    held_out: Tensor  # (windows, time, d) likewise

    @classmethod
    @torch.no_grad()
    def fit(
        cls, activations: Tensor, *, dim: int | None = None, shrink: float = 0.1, held_out: float = 0.5
    ) -> "Calibration":
        """From what the layer is given on windows of background text (windows, time, width).

        A layer of width `dim` (default: that of what it is given) may be given several vectors of that width
        side by side. Each is whitened by itself, and all of them are projected at random onto `dim` channels,
        which hardly changes a cosine.

        The last `held_out` of the windows are kept for the bound on what is touched; the first token of every
        window is left out, because models keep a sink there that no other token resembles.
        """
        check_number("shrink", shrink, "a positive number", lambda value: value > 0)
        check_number("held_out", held_out, "between 0 and 1", lambda value: 0 < value < 1)
        if activations.dim() != 3 or activations.shape[1] < 2:
            raise ValueError(
                f"activations of shape {tuple(activations.shape)}: expected (windows, time, dim)"
            )
        windows, _, width = activations.shape
        dim = width if dim is None else dim
        check_size("dim", dim)
        if width % dim:
            raise ValueError(f"activations of width {width}: expected a multiple of dim={dim}")
        fitted = round(windows * (1 - held_out))
        tokens = activations[:fitted, 1:].reshape(-1, width).double()
        if len(tokens) < dim or fitted == windows:
            raise ValueError(
                f"{windows} windows are too little background for a width of {dim}: {len(tokens)} tokens "
                f"are left to measure a covariance, and {windows - fitted} windows to hold out"
            )
        mean = tokens.mean(0)
        parts = []
        for part in (tokens - mean).split(dim, dim=1):
            values, vectors = torch.linalg.eigh(part.T @ part / len(part))  # smallest first
            parts.append(vectors * (values.clamp(min=0) + shrink * values.mean()).rsqrt())
        if len(parts) > 1:
            drawn = torch.randn(width, dim, generator=torch.Generator().manual_seed(0), dtype=torch.double)
            basis = torch.linalg.qr(drawn).Q.to(tokens.device).split(dim)
            parts = [part @ own for part, own in zip(parts, basis, strict=True)]
        whitening = torch.cat(parts)
        shift = -mean @ whitening
        # the first direction, which is the least or any, makes room for a constant, which patches decode
        whitening[:, 0] = 0
        shift[0] = 1
        whitening, shift = whitening.float(), shift.float()

        def directions(x: Tensor) -> Tensor:
            return ops.unit(torch.addmm(shift, x.reshape(-1, width).float(), whitening)).half()

        return cls(
            whitening,
            shift,
            directions(activations[:fitted, 1:]),
            directions(activations[fitted:, 1:]).view(windows - fitted, -1, dim),
        )

    @torch.no_grad()
    def install(self, layer: APN) -> None:
        """Make a layer of rank 1 whiten by this; the code of every patch becomes the constant 1."""
        if layer.whitening is None or layer.whitening_shift is None or layer.radius is None:
            raise ValueError(
                "the layer has no basins in a whitened space: build it with radius= and whiten=True"
            )
        layer.whitening.copy_(self.whitening)
        layer.whitening_shift.copy_(self.shift)
        layer.encoder.zero_()
        layer.encoder[0] = CONSTANT

    @torch.no_grad()
    def nearest(self, keys: Tensor) -> Tensor:
        """The largest cosine of each key (n, d) with any background direction."""
        background = self.keys.to(keys)
        return torch.cat([(part @ background.T).amax(1) for part in keys.split(1024)])

    @torch.no_grad()
    def touched(self, layer: APN) -> Touched:
        """What the basins of a layer do to background that neither they nor the whitening were chosen by."""
        assert layer.radius is not None
        prototypes, radius, adds = ops.unit(layer.prototypes.float()), layer.radius.float(), layer.adds

        def share(window: Tensor) -> Tensor:
            depth, patch = (window.to(prototypes) @ prototypes.T - radius).topk(layer.config.top_k)
            return ((depth > 0) & adds[patch]).any(1).float().mean()

        inside = torch.stack([share(window) for window in self.held_out])
        count, hit = len(inside), int((inside > 0).sum())
        return Touched(inside.mean().item(), hit / count, clopper_pearson(hit, count))


def clopper_pearson(hits: int, count: int, confidence: float = 0.95) -> float:
    """The exact upper limit of a share of which `hits` of `count` independent trials had been hits.

    >>> round(clopper_pearson(0, 300), 4)
    0.0099
    """
    if hits == count:
        return 1.0
    low, high = hits / count, 1.0
    for _ in range(60):  # the largest share that gives so few hits with a probability of 5 % still
        middle = (low + high) / 2
        few = sum(
            math.exp(
                math.lgamma(count + 1)
                - math.lgamma(k + 1)
                - math.lgamma(count - k + 1)
                + (k * math.log(middle) if k else 0.0)
                + (count - k) * math.log1p(-middle)
            )
            for k in range(hits + 1)
        )
        low, high = (middle, high) if few > 1 - confidence else (low, middle)
    return high
