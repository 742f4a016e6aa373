"""Clipping by a norm: who stalls where a benign gradient is huge, and what one bad batch does afterwards.

    python benchmarks/clip_stall.py                            # the tables
    python benchmarks/clip_stall.py --json benchmarks/results/clip_stall.json --picture docs/images/clip_stall.png
    python benchmarks/clip_stall.py --steps 12 --only stall    # something quick

Megatron-LM's pull request 5395 met it with a 35B model: the gradients of a few layers grow to norms of 1e7 to 1e11,
harmlessly, and clipping all gradients by their common norm leaves next to nothing of the others. Here a small Llama
learns one batch by heart, and a few of its gradients are multiplied so that the common norm grows in the same way.
Directions stay what they were, so without clipping nothing is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm

VOCAB, SEQUENCES, LENGTH = 256, 8, 32
LR = 3e-3
MAX_NORM = 1.0
HUGE = (1e7, 1e11)  # norm of all gradients at the first and at the last step
OUTLIER = 1e4  # norm of the bad batch's gradient, in usual ones
STEADY = 1e8  # of a huge gradient that a bad batch leaves as it is
SKIP_ABOVE = 10.0
HALVES = ("muon", "adamw")
# Whose gradients are huge: the queries and keys of one block, which are Muon's, or one norm, which is AdamW's.
PLACES = {
    "muon": ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"),
    "adamw": ("layers.0.input_layernorm.weight",),
}
Row = dict[str, Any]
Groups = Mapping[str, Sequence[Tensor]]
Clipping = Callable[["Training"], Any]


class Training:
    """One model, one batch, and the optimizers of one contender.

    Attributes:
        halves: By half, the parameters whose gradients are nowhere made huge.
        optimizers: One, or two where matrices and the rest have one each.
    """

    def __init__(self, contender: str, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
        self.model = LlamaForCausalLM(config)
        self.batch, self.random = torch.randint(VOCAB, (2, SEQUENCES, LENGTH))
        groups = {half: list[Tensor]() for half in HALVES}
        for group in mm.split_params(self.model):
            groups[group["algorithm"]] += group["params"]
        huge = {p for place in PLACES for p in self.parameters(place)}
        self.halves = {half: [p for p in parameters if p not in huge] for half, parameters in groups.items()}
        self.optimizers = OPTIMIZERS[contender](self.model, groups, dtype)

    def parameters(self, place: str) -> list[Tensor]:
        """Those whose gradients are made huge there."""
        return [self.model.model.get_parameter(name) for name in PLACES[place]]

    def backward(self, labels: Tensor) -> float:
        """Put the gradients in place; return the loss."""
        self.model.zero_grad()
        loss = self.model(input_ids=self.batch, labels=labels).loss
        loss.backward()
        return float(loss.detach())

    def clip_and_step(self, clip: Clipping) -> dict[str, Tensor]:
        """Return what the step added to each half."""
        before = {half: flat(parameters) for half, parameters in self.halves.items()}
        clip(self)
        for optimizer in self.optimizers:
            optimizer.step()
        return {half: flat(parameters) - before[half] for half, parameters in self.halves.items()}


def flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in parameters])


def norm(parameters: Sequence[Tensor]) -> float:
    """Norm of the gradients, in fp64."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def multiply(parameters: Sequence[Tensor], wanted: float) -> None:
    """Multiply the gradients to a norm."""
    factor = wanted / norm(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# ---------------------------------------------------------------- who takes part


def adamw(model: LlamaForCausalLM, groups: Groups, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)]


def torch_muon(model: LlamaForCausalLM, groups: Groups, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """As torch ships it: for matrices only, and AdamW beside it."""
    return [
        torch.optim.Muon(groups["muon"], lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups["adamw"], lr=LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def ours(model: LlamaForCausalLM, groups: Groups, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    return [mm.from_model(model, lr=LR, weight_decay=0.0, compute_dtype=dtype)]


OPTIMIZERS = {"AdamW": adamw, "torch.optim.Muon": torch_muon, "muonmesh": ours}


def by_policy(**options: Any) -> Clipping:
    return lambda training: training.optimizers[0].clip_grad_norm_(MAX_NORM, **options)


def by_optimizer(training: Training) -> None:
    for optimizer in training.optimizers:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_NORM)


# What trainers do that know nothing of the optimizer is "torch": all gradients by their common norm.
EVERYBODY: dict[str, Clipping] = {
    "none": lambda training: None,
    "torch": lambda training: torch.nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM),
}
CLIPPINGS: dict[str, dict[str, Clipping]] = {
    "AdamW": EVERYBODY,
    "torch.optim.Muon": {**EVERYBODY, "torch, each half": by_optimizer},
    "muonmesh": {
        **EVERYBODY,
        **{policy: by_policy(policy=policy) for policy in ("all", "adamw_only", "separate")},
    },
}
SKIPPING = {f"adamw_only, skip_above={above}": by_policy(skip_above=above) for above in (SKIP_ABOVE, "4x")}


# ---------------------------------------------------------------- a huge gradient


def stall(place: str, steps: int) -> list[Row]:
    """Train while the norm grows from the one of `HUGE` to the other."""
    rows: list[Row] = []
    for contender, name, clip in ((who, name, clip) for who in OPTIMIZERS for name, clip in CLIPPINGS[who].items()):
        training = Training(contender)
        losses, sizes = list[float](), {half: list[float]() for half in HALVES}
        for step in range(steps):
            losses.append(training.backward(training.batch))
            multiply(training.parameters(place), HUGE[0] * (HUGE[1] / HUGE[0]) ** (step / (steps - 1)))
            update = training.clip_and_step(clip)
            for half in HALVES:
                sizes[half].append(float(update[half].square().mean().sqrt()))
        dtypes = (torch.bfloat16, torch.float32) if contender == "muonmesh" else ()
        firsts = [first_update(contender, dtype, place, clip) for dtype in dtypes]
        if name == "none":
            unclipped, fell, others = sizes, losses[0] - losses[-1], firsts
        row: Row = {"optimizer": contender, "clipping": name, "loss": losses[-1]}
        row["stalls"] = losses[0] - losses[-1] < fell / 2
        for half in HALVES:
            shares = [size / other for size, other in zip(sizes[half], unclipped[half], strict=True)]
            row[half] = {"median": statistics.median(shares), "least": min(shares), "all": shares}
        for dtype, first, other in zip(dtypes, firsts, others, strict=True):
            row[f"differs, {str(dtype)[6:]}"] = float((first - other).norm() / other.norm())
        rows.append(row | {"losses": losses})
    return rows


def first_update(contender: str, dtype: torch.dtype, place: str, clip: Clipping) -> Tensor:
    """Return the first update of Muon's half where the norm is the largest."""
    training = Training(contender, dtype)
    training.backward(training.batch)
    multiply(training.parameters(place), HUGE[1])
    return training.clip_and_step(clip)["muon"]


def print_stall(console: Console, place: str, rows: Sequence[Row]) -> None:
    steps = len(rows[0]["losses"])
    header = ["optimizer", "clipping", f"loss after {steps} steps", "stalls", "matrices", "the rest", "differs"]
    table = Table(*header, box=MARKDOWN, title=f"Huge gradients in {place}'s half", title_justify="left")
    for row in rows:
        sizes = [f"{row[half]['median']:.2g} ({row[half]['least']:.2g})" for half in HALVES]
        differs = [f"{row[key]:.1g}" for key in row if key.startswith("differs")]
        stalls = "yes" if row["stalls"] else "no"
        table.add_row(row["optimizer"], row["clipping"], f"{row['loss']:.4f}", stalls, *sizes, ", ".join(differs))
    console.print(table)
    console.print(
        "matrices, the rest: RMS of a step's update over that of the same step without clipping, median (least) of all "
        "steps, without the layers whose gradients are huge; differs: first update of Muon's half at norm "
        f"{HUGE[1]:.0e} against the unclipped one, relative, bf16 and fp32 compute\n"
    )


# ---------------------------------------------------------------- one bad batch


def spike(steps: int, at: int, place: str | None) -> list[Row]:
    """Train; at one step labels are random and the gradient is `OUTLIER` times the usual.

    With a place, gradients there are of norm `STEADY` at every step and hide the others from a common norm.
    """
    rows: list[Row] = []
    clippings = {**CLIPPINGS, "muonmesh": {**CLIPPINGS["muonmesh"], **SKIPPING}}
    takes_part = OPTIMIZERS if place is None else ("muonmesh",)
    for contender, name, clip in ((who, name, clip) for who in takes_part for name, clip in clippings[who].items()):
        training = Training(contender)
        losses, norms = list[float](), list[float]()
        everything = [*training.model.parameters()]
        for step in range(steps):
            losses.append(training.backward(training.batch))
            norms.append(norm(everything))
            if step == at:
                training.backward(training.random)
                multiply(everything, OUTLIER * statistics.median(norms[-10:]))
            if place is not None:
                multiply(training.parameters(place), STEADY)
            training.clip_and_step(clip)
        before, after = losses[at], losses[at + 1 :]
        back = [step for step in range(len(after)) if max(after[step:]) <= before]
        row: Row = {"optimizer": contender, "clipping": name, "before": before, "highest": max(after)}
        rows.append(row | {"steps to recover": back[0] if back else None, "loss": losses[-1], "losses": losses})
    return rows


def print_spike(console: Console, place: str | None, rows: Sequence[Row]) -> None:
    steps = len(rows[0]["losses"])
    header = ["optimizer", "clipping", "loss before", "highest after", "steps to recover", f"loss after {steps} steps"]
    beside = "" if place is None else f", gradients of norm {STEADY:.0e} in {place}'s half beside it"
    table = Table(*header, box=MARKDOWN, title=f"One bad batch{beside}", title_justify="left")
    for row in rows:
        back = "–" if row["steps to recover"] is None else str(row["steps to recover"])
        figures = [f"{row['before']:.3f}", f"{row['highest']:.3f}", back, f"{row['loss']:.4f}"]
        table.add_row(row["optimizer"], row["clipping"], *figures)
    console.print(table)
    console.print("steps to recover: until the loss stays at or below that before; – not within the run\n")


# ---------------------------------------------------------------- the command

COLOURS = {"AdamW": "#30638e", "torch.optim.Muon": "#3d9970", "muonmesh": "#d1495b"}
DASHES = {"none": "-", "torch": ":", "adamw_only": "--", "separate": "-."}


def draw(path: Path, idle: Sequence[Row], spiked: Sequence[Row]) -> None:
    """Draw the losses of both experiments, and the updates of the first."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.4), dpi=100, layout="constrained")
    shown = (
        ("Norm growing from 1e7 to 1e11: loss", [(row, row["losses"]) for row in idle]),
        (
            "Matrices' update over the unclipped one",
            [(row, row["muon"]["all"]) for row in idle if row["clipping"] != "none"],
        ),
        ("One batch of 1e4 times the usual norm: loss", [(row, row["losses"]) for row in spiked]),
    )
    for axes, (title, curves) in zip(panels, shown, strict=True):
        for row, values in curves:
            if row["clipping"] in DASHES:
                style = {"color": COLOURS[row["optimizer"]], "linestyle": DASHES[row["clipping"]], "linewidth": 1.3}
                axes.plot(values, label=f"{row['optimizer']}, {row['clipping']}", **style)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stall", "spike"), help="one experiment instead of both")
    parser.add_argument("--steps", type=int, default=120, help="of each training; the bad batch comes after a third")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--picture", type=Path, help="also draw both experiments (PNG)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps: found {options.steps}; needed at least 4")
    if options.picture is not None and options.only is not None:
        parser.error("--picture: found --only; needed both experiments. Leave out one of the options")
    torch.set_num_threads(1)  # the model is small, and sums then round in the same order every time

    console = Console(width=160)
    figures: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    figures |= {"steps": options.steps, "stall": {}, "spike": {}}
    for place in PLACES if options.only != "spike" else ():
        figures["stall"][place] = stall(place, options.steps)
        print_stall(console, place, figures["stall"][place])
    for place in (None, "muon") if options.only != "stall" else ():
        figures["spike"][place or "nothing"] = spike(options.steps, options.steps // 3, place)
        print_spike(console, place, figures["spike"][place or "nothing"])
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(shortened(figures), indent=1) + "\n")
    if options.picture is not None:
        draw(options.picture, figures["stall"]["muon"], figures["spike"]["nothing"])


def shortened(value: Any) -> Any:
    """Round to four digits and leave out the curves, which the picture shows."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items() if key not in ("losses", "all")}
    return [shortened(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
