"""LoRA's two factors, or all weights, under Muon and AdamW, on a model that was trained here; rates swept alike.

    python -m benchmarks.studies.lora --json benchmarks/results/lora.json        # needs peft; minutes on one core
    python -m benchmarks.studies.lora --pretrained adamw --rates .001 .003 .01 .02 .03 .05 .1 --json FILE
    python -m benchmarks.studies.lora --whole --rates .0003 .001 .003 .006 .01 --json benchmarks/results/whole.json

A Llama of `muonmesh train` learns Python's standard library. Then its weights are frozen, and adapters of rank 8 on
all of its linear layers learn another text: the C++ headers that come with torch, cut into the same tokens. With
--whole there are no adapters, and all weights learn it. Every way to train them is tried at the same learning rates
with the first seed, the best of them with all seeds. The scale of Muon's updates is "match_rms_adamw", so that one rate
means the same size of step to both halves. Trainings that are in the JSON already are not repeated, and the weights of
the first model are kept beside the tokens.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.llama import BATCH, HELD_OUT, LENGTH, VOCAB, loss
from benchmarks.studies.sweep import final, rate_at
from benchmarks.studies.trainings import Trainings
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import nn

import muonmesh as mm
from muonmesh.tools.cli.corpus import (
    END_OF_TEXT_ID,
    Windows,
    divide,
    documents_of,
    find_files,
    prepare_corpus,
    texts_of,
)
from muonmesh.tools.cli.model import build_model, model_config

WAYS: dict[str, dict[str, str]] = {
    "AdamW": {"lora_[AB]": "adamw"},
    "Muon on A and B": {"lora_[AB]": "muon"},
    "Muon on B, AdamW on A": {"lora_B": "muon", "lora_A": "adamw"},
    "Muon on B, A frozen": {"lora_B": "muon"},
}
WHOLE: dict[str, dict[str, str]] = {"AdamW on all weights": {".*": "adamw"}, "Muon on all weights": {}}
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RANK = 8
FIRST: dict[str, dict[str, Any]] = {"muon": {"lr": 6e-3}, "adamw": {"lr": 3e-3, "overrides": {".*": "adamw"}}}
"""How the model is trained before, each with the best rate of results/adamw_sweep.json."""
SETTINGS: dict[str, Any] = {"process_group": "local", "compute_dtype": torch.float32}  # bf16 is emulated on most CPUs


Text = tuple[np.ndarray, np.ndarray]
"""Tokens to learn from, and held out."""


def in_tokens_of(folder: str, pattern: str) -> Text:
    """Another text than that of a folder of `prepare_corpus`, with whole documents held out, in the same tokens."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    parts: tuple[list[int], list[int]] = ([], [])
    for name, text in documents_of(texts_of(find_files([pattern]))):
        for part, document in zip(parts, divide(name, text, whole=True), strict=True):
            if document:
                part += [*tokenizer.encode(document, add_special_tokens=False).ids, END_OF_TEXT_ID]
    return np.array(parts[0]), np.array(parts[1])


def train(model: nn.Module, optimizer: mm.Muon, text: Text, seed: int, steps: int) -> list[tuple[int, float]]:
    """Train, and return validation losses by step."""
    windows = Windows(text[0], length=LENGTH, seed=seed)
    held_out = torch.from_numpy(Windows(text[1], length=LENGTH, seed=0).spread(HELD_OUT))
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[tuple[int, float]] = []
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_at(step, steps)
        batch = torch.from_numpy(windows.shuffled(range(step * BATCH, (step + 1) * BATCH)))
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, steps // 10) == 0:
            with torch.no_grad():
                losses.append((step + 1, float(loss(model, held_out))))
            if not math.isfinite(losses[-1][1]):
                break
    return losses


def adapt(base: nn.Module, variant: str, lr: float, seed: int, text: Text, steps: int) -> dict[str, Any]:
    """Train fresh adapters on a frozen model, or a copy of the whole model, in one way."""
    torch.manual_seed(seed)
    if variant in WHOLE:
        model = copy.deepcopy(base)
        optimizer = mm.from_model(model, lr=lr, overrides=WHOLE[variant], **SETTINGS)
        return {"validation": train(model, optimizer, text, seed, steps)}
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(copy.deepcopy(base), config)
    if "frozen" in variant:
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
    optimizer = mm.from_model(model, lr=lr, weight_decay=0.0, overrides=WAYS[variant], **SETTINGS)
    return {"validation": train(model, optimizer, text, seed, steps)}


def best(runs: list[dict[str, Any]], variant: str) -> list[dict[str, Any]]:
    """The trainings in one way at its best learning rate."""
    trainings = [run for run in runs if run["way"] == variant]
    rate = min((run for run in trainings if run["seed"] == 0), key=final)["lr"]
    return [run for run in trainings if run["lr"] == rate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a preset of `muonmesh train`")
    parser.add_argument("--pretrained", choices=FIRST, default="muon", help="by what the model is trained before")
    parser.add_argument("--first", type=int, default=300, help="steps in which the model is trained before")
    parser.add_argument("--steps", type=int, default=120, help="steps of the adapters")
    parser.add_argument("--whole", action="store_true", help="train all weights, without adapters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    options_of_run = parser.parse_args()
    corpus = prepare_corpus((), vocab=VOCAB, cache=options_of_run.cache)
    headers = str(Path(torch.__file__).parent / "include" / "ATen" / "*.h")
    other = in_tokens_of(corpus.directory, headers)
    torch.manual_seed(0)
    model = build_model(model_config(options_of_run.model, vocab=corpus.vocab, seq=LENGTH))
    kind = "" if options_of_run.pretrained == "muon" else f"-{options_of_run.pretrained}"
    weights = options_of_run.cache / f"lora-{options_of_run.model}-{options_of_run.first}{kind}.pt"
    stdlib = corpus.train(), corpus.validation()
    if weights.is_file():
        model.load_state_dict(torch.load(weights, weights_only=True))
    else:
        before = train(
            model, mm.from_model(model, **FIRST[options_of_run.pretrained], **SETTINGS), stdlib, 0, options_of_run.first
        )
        print(f"trained first: {before[-1][1]:.4f} on its own text", flush=True)
        torch.save(model.state_dict(), weights)
    held_out = torch.from_numpy(Windows(other[1], length=LENGTH, seed=0).spread(HELD_OUT))
    with torch.no_grad():
        start = float(loss(model, held_out))
    print(f"before its adapters: {start:.4f} on the other text", flush=True)
    options = {
        "model": options_of_run.model,
        "first": options_of_run.first,
        "steps": options_of_run.steps,
        "rank": RANK,
        "start": start,
    }
    options |= {} if options_of_run.pretrained == "muon" else {"pretrained": options_of_run.pretrained}
    trainings = Trainings(options_of_run.json, options)
    runs = trainings.runs

    def trained(variant: str, lr: float, seed: int) -> dict[str, Any]:
        key = {"way": variant, "lr": lr, "seed": seed}
        return trainings.get(lambda: adapt(model, variant, lr, seed, other, options_of_run.steps), **key)

    for variant in WHOLE if options_of_run.whole else WAYS:
        for rate in options_of_run.rates:
            print(f"{variant:24s} {rate:7g} {final(trained(variant, rate, 0)):.4f}", flush=True)
        rate = best(runs, variant)[0]["lr"]
        for seed in range(1, options_of_run.seeds):
            trained(variant, rate, seed)
        losses = [final(run) for run in best(runs, variant)]
        print(f"{variant:24s} {rate:7g} {statistics.mean(losses):.4f} ± {max(losses) - min(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
