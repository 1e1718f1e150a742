"""SmolLM2 learns the spelling of 1623 in APN layers beside its FFNs; a guard bounds what it can forget.

python examples/retrofit_smollm2.py              a few minutes on a GPU, half an hour on two CPU cores
python examples/retrofit_smollm2.py 20           with 20 steps: to see it run
"""

import math
import sys
from typing import Any

import torch

import attractor
from attractor import APNConfig, CausalLM, Guard, evaluate, load_pretrained, read_text, teach

CONTEXT = 128


def main(steps: int = 200) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_pretrained("smollm2-135m", device=device)
    new, old = (tokenizer.encode(read_text(name)[:600_000]) for name in ("first-folio", "python"))
    train, validation, test = new[:-8000], new[-8000:-4000], new[-4000:]
    sample = torch.from_numpy(train[: 32 * CONTEXT]).view(32, CONTEXT)
    net = attractor.retrofit(
        model, APNConfig(num_patches=16, top_k=8, rank=64), prototypes="kmeans", sample=sample, name="folio"
    )
    net.print_trainable_parameters()
    folio = CausalLM(net, "folio", context=CONTEXT)
    paths: dict[str, Any] = {"base": CausalLM(net, None, context=CONTEXT), "folio": folio}
    done = teach(
        folio,
        net.trainable_parameters(),
        train,
        validation,
        steps=steps,
        batch_size=8,
        learning_rate=1e-2,
        report=show,
    )
    print(f"validation loss {done['before']:.3f} -> {done['best']:.3f} at step {done['best_step']}")
    paths["guarded"] = guard = Guard(paths)  # one copy of the weights, two ways through them
    for name, tokens in {"First Folio": test, "Python": old[-4000:]}.items():
        losses = {way: evaluate.evaluate(path, tokens, batch_size=4) for way, path in paths.items()}
        print(f"{name:12s}", *(f"{way} {math.exp(loss):8.3f}  " for way, loss in losses.items()))
    print(f"the guard may cost {math.expm1(guard.bound(CONTEXT) / CONTEXT):.2%} at most, on any text")
    net.save_pretrained("runs/folio-adapter")


def show(record: dict[str, float]) -> None:
    if "val/ppl" in record:
        print(f"step {record['step']:4.0f}  validation perplexity {record['val/ppl']:.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
