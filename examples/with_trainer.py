"""A retrofit in the Trainer of transformers: APN layers beside the FFNs of a model, trained, saved, read.

    python examples/with_trainer.py

Needs the extra "hf". The model is a tiny Llama that is made here; put `from_pretrained` in its place.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attractor
from attractor import APNCallback, APNConfig


def count_up(start: int) -> dict[str, torch.Tensor]:
    """A text of tokens that the model is to learn to go on with: n, n + 1, n + 2, ..."""
    tokens = torch.arange(start, start + 16) % 64
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
    base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **shape))
    net = attractor.retrofit(base, APNConfig(num_patches=16, top_k=4, rank=8))
    net.print_trainable_parameters()  # the base is frozen
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=2e-2,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        texts = [count_up(start) for start in range(64)]
        trainer = Trainer(net, arguments, train_dataset=texts, callbacks=[APNCallback(warmup_steps=10)])
        trainer.train()
        trainer.save_model()
        tokens = texts[0]["input_ids"][None]
        learned = net.eval()(tokens).logits
        again = attractor.load_retrofit(net.unload(), folder)  # what was saved, onto the base
        assert torch.equal(again.eval()(tokens).logits, learned)
    log = trainer.state.log_history
    print(f"loss {log[0]['loss']:.2f} -> {log[-2]['loss']:.2f}")
    print(f"patches are used with an entropy of {log[-2]['apn/0/usage_entropy']:.2f} nats in block 0")


if __name__ == "__main__":
    main()
