"""What patches are for: the loss by patch, the active sets that occur, and the rank of an update.

    python -m studies anatomy --size smoke
    python -m studies anatomy --size small     some minutes on two CPU cores

Three things that the paper says and does not measure. The expected loss is a sum over the patches that are
first choice (section "A routed decomposition of the loss"): here is how unequal its parts are, and how much
of the difference between tokens the patch explains, beside what the token itself explains. Of all
(K choose k) active sets few occur: here is how many. And its heuristic for the rank compares k r with the
effective rank of a dense FFN of the same width: here are both, for what one token does and for all together.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attractor.data import windows
from attractor.evaluate import routing, token_losses
from attractor.layer import APN
from attractor.lm import mode
from attractor.model import GPT
from studies.grid import Inquiry, Settings, Values
from studies.plan import HOME, PLANS, device_of, domain, load_base
from studies.statistics import mean

if TYPE_CHECKING:
    from studies.cells import Benchmark

OFTEN = (10, 100, 1000)
"""So many of the commonest active sets: which share of the tokens has one of them?"""
TOKENS = 64
"""Whose maps are taken apart: each is a product of matrices of its own."""


def examine(settings: Settings, folder: Path) -> Values:
    """The cell of one model."""
    plan = PLANS[settings["size"]]
    model = load_base(folder, settings["base"], device_of(settings))
    text = domain(plan, folder, settings["members"][0]).test
    found: Values = {"ranks": ranks(model, text)}
    if model.apn_layers():
        loss = token_losses(model, text).double().cpu().numpy()
        found["loss"] = float(loss.mean())
        found["layers"] = {
            str(number): {
                **by_patch(loss, stats.indices[..., 0].flatten().numpy(), text[1:]),
                **active_sets(stats.indices.flatten(0, -2), stats.num_patches),
            }
            for number, stats in routing(model, text).items()
        }
    return found


def by_patch(loss: np.ndarray, patch: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """The parts of E[loss] = sum_i P(I = i) E[loss | I = i], I the patch that is first choice.

    "explained" is the share of the loss's variance that lies between patches. Groups of the same sizes that
    mean nothing would explain "by chance"; what is to be predicted, were it known, explains "by the answer".
    """
    count = np.bincount(patch)
    own = np.bincount(patch, loss)[count > 0] / count[count > 0]
    share = count[count > 0] / len(loss)
    variance = loss.var()
    answer = np.bincount(predicted)
    of_answer = np.bincount(predicted, loss)[answer > 0] / answer[answer > 0]
    return {
        "parts": [[round(float(p), 6), round(float(nats), 5)] for p, nats in zip(share, own, strict=True)],
        "quantiles": [float(np.quantile(own, q)) for q in (0.1, 0.5, 0.9)],
        "explained": float((share * (own - loss.mean()) ** 2).sum() / variance),
        "by chance": (len(own) - 1) / (len(loss) - 1),
        "by the answer": float(
            (answer[answer > 0] / len(loss) * (of_answer - loss.mean()) ** 2).sum() / variance
        ),
    }


def active_sets(indices: Tensor, num_patches: int) -> dict[str, Any]:
    """How many sets of k patches occur among these tokens (n, k), and how often the common ones do."""
    top_k = indices.shape[1]
    _, count = torch.unique(indices.sort(1).values, dim=0, return_counts=True)
    count = count.sort(descending=True).values.double()
    share = count / count.sum()
    return {
        "tokens": len(indices),
        "possible": math.comb(num_patches, top_k),
        "occur": len(count),
        "once": int((count == 1).sum()),
        "effective": float(torch.exp(-(share * share.log()).sum())),  # as many equally common ones
        "covered": {str(most): float(share[:most].sum()) for most in OFTEN},
    }


def ranks(model: GPT, text: np.ndarray) -> dict[str, Any]:
    """The effective rank of each FFN: of the updates of all tokens, and of the map that one token sees."""
    inputs = ffn_inputs(model, text)
    found = {}
    for number, (block, x) in enumerate(zip(model.blocks, inputs, strict=True)):
        with torch.no_grad():
            update = block.ffn(x)
        config = block.ffn.config if isinstance(block.ffn, APN) else None
        maps = [effective_rank(jacobian(block.ffn, token)) for token in x[:TOKENS]]
        found[str(number)] = {
            "updates": effective_rank((update - update.mean(0)).double()),
            "map": mean(maps),
            "bound": None if config is None else config.top_k * config.rank,
            "code": None if config is None else config.rank,
        }
    return found


def jacobian(ffn: nn.Module, token: Tensor) -> Tensor:
    """How the update (d) of a token changes with it: (d, d)."""
    found = torch.autograd.functional.jacobian(lambda x: ffn(x[None])[0], token)
    assert isinstance(found, Tensor)
    return found.double()


def effective_rank(matrix: Tensor) -> float:
    """exp of the entropy of the singular values' shares (Roy and Vetterli, 2007): 1 to their number."""
    values = torch.linalg.svdvals(matrix)
    share = values / values.sum()
    return float(torch.exp(-(share * share.clamp(min=1e-300).log()).sum()))


@torch.no_grad()
def ffn_inputs(model: GPT, text: np.ndarray) -> list[Tensor]:
    """What each FFN is given on the first windows of a text: (n, d)."""
    seen: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.ffn.register_forward_pre_hook(
            lambda _, given, place=place: place.append(given[0].flatten(0, -2))
        )
        for block, place in zip(model.blocks, seen, strict=True)
    ]
    try:
        with mode(model, training=False):
            inputs, *_ = next(iter(windows(text, model.config.context, 16)))
            model(inputs.to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    chosen = torch.randperm(len(seen[0][0]), generator=torch.Generator().manual_seed(0))
    return [torch.cat(parts)[chosen.to(parts[0].device)] for parts in seen]


def run(bench: "Benchmark", result: Path) -> dict[str, Any]:
    seeds, kinds = range(bench.plan.seeds), ("dense", "apn")

    def examined(kind: str, seed: int) -> Inquiry[Values]:
        yield bench.pretrain(kind, HOME, seed)
        return next(iter((yield bench.anatomy(kind, HOME, seed)).values()))

    found = bench.answer({(kind, seed): examined(kind, seed) for seed in seeds for kind in kinds})
    rows = {kind: [found[kind, seed] for seed in seeds] for kind in kinds}
    return bench.write(
        result,
        "anatomy",
        seeds=len(seeds),
        text=HOME,
        layers=summed_up(rows["apn"]),
        ranks={kind: ranks_of(cells) for kind, cells in rows.items()},
        cells=rows,
        config={kind: bench.plan.config(kind, 0).to_dict() for kind in kinds},
    )


def summed_up(cells: Sequence[Values]) -> dict[str, dict[str, Any]]:
    """Each figure of each APN layer, in the mean over seeds."""
    return {
        layer: {
            **{
                name: mean(cell["layers"][layer][name] for cell in cells)
                for name in (
                    "explained",
                    "by chance",
                    "by the answer",
                    "occur",
                    "once",
                    "effective",
                    "possible",
                )
            },
            "tokens": cells[0]["layers"][layer]["tokens"],
            "covered": {
                most: mean(cell["layers"][layer]["covered"][most] for cell in cells)
                for most in map(str, OFTEN)
            },
            "quantiles": [mean(cell["layers"][layer]["quantiles"][q] for cell in cells) for q in range(3)],
        }
        for layer in cells[0]["layers"]
    }


def ranks_of(cells: Sequence[Values]) -> dict[str, dict[str, Any]]:
    return {
        layer: {
            **{name: mean(cell["ranks"][layer][name] for cell in cells) for name in ("updates", "map")},
            **{name: cells[0]["ranks"][layer][name] for name in ("bound", "code")},
        }
        for layer in cells[0]["ranks"]
    }
