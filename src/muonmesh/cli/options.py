"""Options: what ``muonmesh train`` can be told, by name, with its help. Values that are left out are in `Settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from muonmesh.cli.settings import Dtype, OptimizerChoice, Parallel, ScheduleName

WHAT = "What to learn"
HOW = "How to learn"
WHERE = "Where to run"
OUTPUT = "What to keep"

Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Files, folders or globs of text, JSONL, Parquet, or a folder of datasets; repeatable. Default: the "
        "Python standard library.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="A preset (nano, small, medium, large, xl), a transformers config.json or a folder with one, or a model "
        "type (gpt2).",
        rich_help_panel=WHAT,
    ),
]
Vocab = Annotated[int, typer.Option(help="Size of the tokenizer that is trained.", rich_help_panel=WHAT)]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence.", rich_help_panel=WHAT)]
OptimizerOption = Annotated[
    OptimizerChoice, typer.Option(help="Both: one after the other, from the same weights.", rich_help_panel=HOW)
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.", rich_help_panel=HOW)]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Sequences in a step, over all ranks. Default: 16, or the next number the ranks can share.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
GradAccum = Annotated[int, typer.Option(help="Forward and backward passes in a step.", rich_help_panel=HOW)]
Lr = Annotated[float, typer.Option(help="Peak learning rate of Muon, both halves.", rich_help_panel=HOW)]
AdamwLr = Annotated[float, typer.Option(help="Peak learning rate of the AdamW training.", rich_help_panel=HOW)]
ScheduleOption = Annotated[
    ScheduleName,
    typer.Option(help="After warmup; wsd is constant until its last fifth.", rich_help_panel=HOW),
]
Warmup = Annotated[
    int | None,
    typer.Option(help="Steps of linear warmup. Default: a tenth.", rich_help_panel=HOW, show_default=False),
]
WeightDecay = Annotated[float, typer.Option(help="Decoupled; vectors are never decayed.", rich_help_panel=HOW)]
Clip = Annotated[
    float, typer.Option(help="Largest gradient norm, of what AdamW updates; 0 never clips.", rich_help_panel=HOW)
]
Seed = Annotated[int, typer.Option(help="Of weights, data order and dropout.", rich_help_panel=HOW)]
Ranks = Annotated[
    int | None,
    typer.Option(help="Processes. Default: one a GPU, or 2 on a CPU.", rich_help_panel=WHERE, show_default=False),
]
ParallelOption = Annotated[
    Parallel,
    typer.Option(
        help="FSDP2 shards every layer; DDP replicates; HSDP shards within each of two replicas; TP shares the "
        "work in every layer of a Llama-like model; FSDP+TP shares it in pairs of ranks and shards over the "
        "pairs; zeroN is --engine deepspeed --zero N.",
        rich_help_panel=WHERE,
    ),
]
Engine = Annotated[
    Literal["torch", "deepspeed"],
    typer.Option(help="Who holds the weights: torch's --parallel, or DeepSpeed's --zero.", rich_help_panel=WHERE),
]
Zero = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=3,
        help="Stage of ZeRO with --engine deepspeed. Default: 2.",
        rich_help_panel=WHERE,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Auto: the GPUs where there are any.", rich_help_panel=WHERE)
]
DtypeOption = Annotated[
    Literal["auto", Dtype],
    typer.Option(
        help="Of forward and backward; weights are fp32. Auto: bf16 where it is native.", rich_help_panel=WHERE
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Directory of the run. Default: runs/MODEL-DATE.", rich_help_panel=OUTPUT, show_default=False),
]
EvalEvery = Annotated[
    int | None,
    typer.Option(
        help="Steps between two validations. Default: a twentieth.", rich_help_panel=OUTPUT, show_default=False
    ),
]
EvalSequences = Annotated[int, typer.Option(help="Held-out sequences in a validation.", rich_help_panel=OUTPUT)]
CheckpointEvery = Annotated[
    int,
    typer.Option(help="Steps between two checkpoints; 0: at the end and on Ctrl-C only.", rich_help_panel=OUTPUT),
]
Keep = Annotated[
    int, typer.Option(help="How many checkpoints of each training stay: the newest whole ones.", rich_help_panel=OUTPUT)
]
Resume = Annotated[
    str | None,
    typer.Option(
        help="Directory of a run to go on with, as if it had never stopped. Its settings are kept; only --ranks "
        "and --parallel may change. Auto: --out, if a run is there; else begin one there.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
SaveMomentum = Annotated[
    str | None,
    typer.Option(
        help="Also write Muon's final momentum matrices to this safetensors file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]

TextField = Annotated[
    str,
    typer.Option(help="Field or column of JSONL, Parquet and datasets that holds the text.", rich_help_panel=WHAT),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Local folder with a tokenizer.json, instead of training one on the text.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        help="Local folder of from_pretrained: its model, its weights, and its tokenizer unless there is --tokenizer.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
CheckpointActivations = Annotated[
    bool,
    typer.Option(
        "--checkpoint-activations",
        help="Compute the inside of every layer again in the backward pass instead of keeping it.",
        rich_help_panel=WHERE,
    ),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile every layer with torch.compile.", rich_help_panel=WHERE)
]
Export = Annotated[
    bool,
    typer.Option(
        "--export", help="Also write each trained model as a folder for from_pretrained.", rich_help_panel=OUTPUT
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        help="Tensorboard or wandb (offline): where metrics go too, beside metrics.jsonl (jsonl); repeatable.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        help="Peak learning rates that each optimizer tries: lr=0.003,0.006. Whole trainings, one after the other.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        help="Seeds that each training of a sweep is repeated with: 0,1,2.", rich_help_panel=HOW, show_default=False
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say who would own what, memory and expected time, and train nothing.", rich_help_panel=OUTPUT
    ),
]
