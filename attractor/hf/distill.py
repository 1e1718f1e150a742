"""An FFN becomes an APN layer: the layer learns to give what the FFN gives, on a sample of its own inputs."""

import torch
from torch import Tensor

from attractor.layer import APN
from attractor.lm import mode
from attractor.loop import Loop, annealed, descend

LAST = ("decoder", "decoder_base", "offset_out")
"""The parameters of a layer that its update is linear in."""
BATCH = 1024
LEARNING_RATE = 1e-2
HELD_OUT = 10
"""One token in so many is not trained on: the error is measured there."""


def distill(layer: APN, inputs: Tensor, outputs: Tensor, *, steps: int, seed: int) -> float:
    """Train all of a float32 layer on inputs and outputs (n, dim); returns the relative error, |e| / |y|.

    AdamW on the squared error, with a learning rate that falls to zero.
    """
    if len(inputs) < 2 * HELD_OUT:
        raise ValueError(f"the sample has {len(inputs)} tokens; distilling needs at least {2 * HELD_OUT}")
    if not (inputs.isfinite().all() and outputs.isfinite().all()):
        raise ValueError("the FFN gives numbers that are not finite on this sample; it cannot be distilled")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
    held_out, taught = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
    loudness_in, loudness_out = (x[taught].square().mean().sqrt().clamp(min=1e-30) for x in (inputs, outputs))
    with torch.no_grad():  # learn in units of what goes in and comes out: one rate then suits every FFN
        if layer.norm is None:
            layer.encoder.div_(loudness_in)
    targets = outputs / loudness_out
    optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.0)

    def take(step: int) -> Tensor:
        chosen = torch.randint(len(taught), (min(BATCH, len(taught)),), generator=generator)
        rows = taught[chosen.to(taught.device)]
        loss = (layer(inputs[rows]) - targets[rows]).square().mean()
        descend(optimizer, [loss], LEARNING_RATE * annealed(step, steps))
        return loss.detach()

    with mode(layer, training=True), torch.enable_grad():
        Loop(take).run_until(steps)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in LAST:
                parameter.mul_(loudness_out)
    return relative_error(layer, inputs[held_out], outputs[held_out])


@torch.no_grad()
def relative_error(layer: APN, inputs: Tensor, outputs: Tensor) -> float:
    with mode(layer, training=False):
        return float((layer(inputs) - outputs).norm() / outputs.norm().clamp(min=1e-30))
