"""Named configurations: `presets.NAMES["paper_apn"]()` is everything `attractor train paper_apn` needs."""

from collections.abc import Callable
from dataclasses import replace

from attractor.config import APNConfig, DataConfig, FFNName, GPTConfig, MoEConfig, RunConfig, TrainConfig


def paper_dense() -> RunConfig:
    """The paper's baseline: 6 layers of width 384 with a dense FFN, 10.65M parameters, char Shakespeare."""
    return RunConfig(model=GPTConfig(dropout=0.2))


def paper_apn() -> RunConfig:
    """The paper's APN: 256 patches of rank 32, 4 active, 23.21M parameters."""
    return with_apn(paper_dense(), APNConfig(init="paper"))


def best_apn() -> RunConfig:
    """The APN that predicts best in a dense model's time on a GPU: 16 of 256 patches of rank 128, 80.34M.

    That holds for a text too large to learn by heart. From a small one, such as Shakespeare, 64 patches with
    16 active learn more, with dropout, a patch_dropout of 0.3 and a weight decay of 1.
    """
    run = with_apn(paper_dense(), APNConfig(num_patches=256, top_k=16, rank=128))
    return replace(run, model=replace(run.model, dropout=0.0))


def tiny_dense() -> RunConfig:
    """A model that two CPU cores train in a minute. GPT-2's start would hold so narrow a dense FFN back."""
    return RunConfig(
        model=GPTConfig(context=64, num_layers=4, num_heads=4, dim=128, ffn_start="unit"),
        train=TrainConfig(
            max_steps=600, batch_size=16, warmup_steps=30, eval_interval=200, checkpoint_interval=200
        ),
    )


def tiny_apn() -> RunConfig:
    """tiny_dense with an APN of about the same parameters per layer."""
    return with_apn(tiny_dense(), APNConfig(num_patches=30, top_k=2, rank=32))


def tiny_moe() -> RunConfig:
    """tiny_dense with the top 2 of 8 experts: 4 times the FFN parameters, the same multiply-adds."""
    return with_mixture(tiny_dense(), "moe", MoEConfig())


def tiny_switch() -> RunConfig:
    """tiny_dense with 4 Switch experts: 4 times the FFN parameters, the same multiply-adds."""
    return with_mixture(tiny_dense(), "switch", MoEConfig(num_experts=4))


def gpt2_small_dense() -> RunConfig:
    """The size of GPT-2 small, byte-pair tokens."""
    return RunConfig(
        model=GPTConfig(vocab_size=32768, context=1024, num_layers=12, num_heads=12, dim=768),
        train=TrainConfig(
            max_steps=20000,
            batch_size=64,
            accumulation=4,
            learning_rate=6e-4,
            min_learning_rate=6e-5,
            warmup_steps=500,
            beta2=0.95,
            eval_interval=1000,
            checkpoint_interval=1000,
        ),
        data=DataConfig(tokenizer="bpe", vocab_size=32768),
    )


def gpt2_small_apn() -> RunConfig:
    """gpt2_small_dense with 256 patches of rank 64."""
    return with_apn(gpt2_small_dense(), APNConfig(rank=64))


def with_apn(run: RunConfig, apn: APNConfig) -> RunConfig:
    return replace(run, model=replace(run.model, ffn="apn", apn=apn))


def with_mixture(run: RunConfig, ffn: FFNName, moe: MoEConfig) -> RunConfig:
    """With the balance weight of Fedus et al. (2.2): without one, a few experts do all the work."""
    model = replace(run.model, ffn=ffn, moe=moe)
    return replace(run, model=model, train=replace(run.train, balance_weight=0.01))


NAMES: dict[str, Callable[[], RunConfig]] = {
    preset.__name__: preset
    for preset in (
        *(paper_dense, paper_apn, best_apn),
        *(tiny_dense, tiny_apn, tiny_moe, tiny_switch),
        *(gpt2_small_dense, gpt2_small_apn),
    )
}
