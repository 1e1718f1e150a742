"""A retrofit trained with accelerate: your own loop, in one process or in many.

    python examples/with_accelerate.py
    torchrun --nproc-per-node 2 examples/with_accelerate.py        # or: accelerate launch ...

Needs the extra "hf". The model is a tiny Llama that is made here; put `from_pretrained` in its place.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import attractor
from attractor import APNConfig


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)  # Accelerator() takes the GPUs that there are
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
    base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **shape))
    net = attractor.retrofit(base, APNConfig(num_patches=16, top_k=4, rank=8))
    texts = (torch.arange(64)[:, None] + torch.arange(16)) % 64  # each counts up: n, n + 1, n + 2, ...
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.trainable_parameters(), lr=2e-2),
        DataLoader(TensorDataset(texts), batch_size=8, shuffle=True),
    )
    for epoch in range(6):
        for (tokens,) in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
    trained, first = accelerator.unwrap_model(model).eval(), texts[:1].to(accelerator.device)
    if accelerator.is_main_process:  # the layers are the same in every process
        learned = trained(first).logits
        with tempfile.TemporaryDirectory() as folder:
            trained.save_pretrained(folder)
            again = attractor.load_retrofit(trained.unload(), folder)
        assert torch.equal(again(first).logits, learned)
        accelerator.print("saved, and read again: the same logits to the bit")
    accelerator.end_training()


if __name__ == "__main__":
    main()
