"""Which features work with which families of transformers: each is tried, and the page is what was found.

    python benchmarks/support.py            # results/support.json and docs/support.md; a minute of one core

A cell is "yes" where the check passed, and else what was raised; nothing here is written by hand.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import peft  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from families import FAMILIES, SMALL, logits, some_tokens, teach, tiny  # noqa: E402

import attractor  # noqa: E402
import attractor.hf  # noqa: E402
from attractor.results import write_result  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
RESULT = ROOT / "results" / "support.json"
VERSIONS = ("transformers", "torch", "peft", "accelerate")


def taught(family: str) -> Any:
    return teach(attractor.retrofit(tiny(family), SMALL))


def check_beside(family: str, folder: Path) -> None:
    model = tiny(family)
    before = logits(model)
    net = attractor.retrofit(model, SMALL)
    assert torch.equal(logits(net), before), "the logits changed"
    assert not torch.equal(logits(teach(net)), before), "the layers have no effect"
    assert torch.equal(logits(net.unload()), before), "it was not undone"


def check_replace(family: str, folder: Path) -> None:
    net = attractor.retrofit(tiny(family), SMALL, mode="replace", sample=some_tokens(4, 16), steps=2)
    assert logits(net).isfinite().all(), "the logits are not finite"


def check_auto(family: str, folder: Path) -> None:
    tiny(family).save_pretrained(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    net = teach(attractor.retrofit(base, SMALL))
    net.save_pretrained(folder / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert torch.equal(logits(again), logits(net)), "the logits differ"


def check_device_maps(family: str, folder: Path) -> None:
    tiny(family).save_pretrained(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    net = teach(attractor.retrofit(base, SMALL))
    net.save_pretrained(folder / "saved")
    expected = logits(net)
    block = net.sites[1].place.name.rpartition(".")[0]
    holders = [path for path, module in net.unload().named_modules() if [*module.parameters(recurse=False)]]
    split = {path: "cpu" for path in holders if not path.startswith(f"{block}.")} | {block: "disk"}
    for name, options in {
        "auto": {"device_map": "auto"},
        "cpu": {"device_map": "cpu"},
        "one block on the disk": {"device_map": split},
        "little memory": {"device_map": "auto", "max_memory": {"cpu": 4 * 32 * 64}},
    }.items():
        options["offload_folder"] = str(folder / name)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved", **options)
        assert torch.equal(logits(again), expected), f"{name}: the logits differ"
        kept = any(weight.is_meta for weight in again.parameters())
        assert kept == (name not in ("auto", "cpu")), f"{name}: weights are elsewhere than asked for"


def written(net: Any, **options: Any) -> list[int]:
    prompt = some_tokens(1, 6)
    found: list[int] = net.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6, do_sample=False,
        **options,
    )[0].tolist()  # fmt: skip
    return found


def check_cache(kind: str) -> Callable[[str, Path], None]:
    def check(family: str, folder: Path) -> None:
        net = taught(family)
        assert written(net, cache_implementation=kind) == written(net, use_cache=False), "other words"

    return check


def check_pipeline(family: str, folder: Path) -> None:
    words = {chr(48 + number): number for number in range(64)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    writer = transformers.pipeline("text-generation", taught(family), tokenizer=tokenizer)
    (found,) = writer("5", max_new_tokens=4, do_sample=False, return_tensors=True)
    assert len(found["generated_token_ids"]) > 1, "it wrote nothing"


def check_trainer(family: str, folder: Path) -> None:
    net = attractor.retrofit(tiny(family), SMALL)
    before = {name: value.clone() for name, value in net.model.state_dict().items()}
    rows = [{"input_ids": row, "labels": row} for row in some_tokens(4, 8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=net.model.supports_gradient_checkpointing,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(net, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    assert any(layer.decoder.any() for layer in net.apn_layers().values()), "nothing was learned"
    assert all(torch.equal(value, before[name]) for name, value in net.model.state_dict().items()), (
        "the base moved"
    )
    learned = logits(net.eval())
    assert torch.equal(logits(attractor.load_retrofit(net.unload().eval(), folder / "saved")), learned), (
        "lost"
    )


def check_peft(family: str, folder: Path) -> None:
    model = peft.get_peft_model(
        tiny(family), peft.LoraConfig(target_modules="all-linear", r=2)
    ).base_model.model
    before = logits(model)
    net = attractor.retrofit(model, SMALL)
    assert torch.equal(logits(net), before), "the logits changed"
    assert not torch.equal(logits(teach(net)), before), "the layers have no effect"


FEATURES: dict[str, Callable[[str, Path], None]] = {
    "beside": check_beside,
    "replace": check_replace,
    "Auto classes": check_auto,
    "device maps": check_device_maps,
    "dynamic cache": check_cache("dynamic"),
    "static cache": check_cache("static"),
    "pipeline": check_pipeline,
    "Trainer": check_trainer,
    "over LoRA": check_peft,
}


def tried(check: Callable[[str, Path], None], family: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(family, Path(folder))
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
            return (
                f"no: {said[:90]}"
                if isinstance(error, AssertionError)
                else f"no: {type(error).__name__}, {said[:90]}"
            )
    return "yes"


def versions() -> dict[str, str]:
    return {name: metadata.version(name).split("+")[0] for name in VERSIONS}


def page(found: dict[str, dict[str, str]], used: dict[str, str]) -> str:
    """The Markdown of what was found with these versions; reasons stand below the table, numbered."""
    reasons: list[str] = []

    def cell(text: str) -> str:
        if text == "yes":
            return text
        if text not in reasons:
            reasons.append(text)
        return f"no ({reasons.index(text) + 1})"

    rows = [[family, *(cell(found[family][name]) for name in FEATURES)] for family in found]
    lines = [
        "# What works with which models",
        "",
        "Written by `python benchmarks/support.py`, which tries each cell with a tiny random model of the",
        "family, with " + ", ".join(f"{name} {version}" for name, version in used.items()) + ".",
        "[Retrofits](retrofit.md) explains the features; the same as JSON is",
        "[results/support.json](../results/support.json).",
        "",
        "| family | " + " | ".join(FEATURES) + " |",
        "|" + "---|" * (1 + len(FEATURES)),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"{number}. {reason.removeprefix('no: ')}" for number, reason in enumerate(reasons, 1)),
        *([""] if reasons else []),
        "- beside, replace: the logits are the base's to the bit until the layers learn, and after `unload`;",
        "  each FFN can be distilled.",
        "- Auto classes: `AutoModelForCausalLM.from_pretrained` of the saved folder has the same logits, to",
        "  the bit.",
        "- device maps: the same where `device_map` is auto, the CPU, or a dictionary with a block on the",
        "  disk, and where `max_memory` leaves nearly all of it there. Several devices were not tried.",
        "- Caches: greedy generation writes the same with the cache and without. Quantized caches need a",
        "  package that no extra of ours has, and were not tried.",
        "- Trainer: a step (with gradient checkpointing where the family has it) trains the layers and not",
        "  the base, and what `save_model` writes loads with the same logits.",
        "- over LoRA: on a base with an adapter of peft, the logits stay the same until the layers learn.",
        "- A GPT of this package is a model of transformers too: it trains with Trainer, loads by the",
        "  Auto classes with its tokenizer, and generates with a dynamic cache",
        "  ([tests](../tests/test_hub_gpt.py)).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        found[family] = {name: tried(check, family) for name, check in FEATURES.items()}
        print(family, found[family], flush=True)
    write_result(RESULT, {"packages": versions(), "found": found})
    PAGE.write_text(page(found, versions()))


if __name__ == "__main__":
    main()
