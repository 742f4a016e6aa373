"""Settings: everything that decides what a run computes, checked before any rank starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

Optimizer = Literal["muon", "adamw"]
OptimizerChoice = Literal["muon", "adamw", "both"]
Parallel = Literal["ddp", "fsdp", "hsdp", "tp", "fsdp+tp", "zero1", "zero2", "zero3"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["bf16", "fp32"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]

REPLICAS = 2  # of the model, under hsdp
PAIR = 2  # ranks that share each layer, under fsdp+tp

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. Plain values only: it is written to ``config.json`` and read back by every rank.

    Learning rates are peaks, in the units of AdamW (Muon's ``match_rms_adamw`` scale makes one number serve both
    halves). ``batch`` counts sequences per optimizer step over **all** ranks, so that a run computes the same
    thing however many ranks share it.

    Raises:
        ValueError: a value is out of range; the message names the option, what was found and what is needed.
    """

    out: str
    data: tuple[str, ...] = ()
    model: str = "small"
    optimizer: OptimizerChoice = "both"
    parallel: Parallel = "fsdp"
    ranks: int = 2
    device: Device = "cpu"
    steps: int = 600
    lr: float = 6e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    schedule: ScheduleName = "cosine"
    warmup: int = 60
    batch: int = 16
    seq: int = 128
    grad_accum: int = 1
    dtype: Dtype = "bf16"
    clip: float = 1.0
    vocab: int = 2048
    seed: int = 0
    eval_every: int = 30
    eval_sequences: int = 128
    checkpoint_every: int = 200
    save_momentum: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{option(name)} {value}: needed a whole number of at least {least}.")
        for name in ("lr", "adamw_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{option(name)} {value}: needed a positive, finite learning rate.")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0:
                raise ValueError(f"{option(name)} {value}: needed zero or more.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{option(name)} {getattr(self, name)!r}: needed one of {', '.join(choices)}.")
        multiple = {"hsdp": REPLICAS, "fsdp+tp": PAIR}.get(self.parallel, 1)
        if self.ranks % multiple:
            raise ValueError(
                f"--ranks {self.ranks}: --parallel {self.parallel} needed a multiple of {multiple}. "
                f"Write: --ranks {math.ceil(self.ranks / multiple) * multiple}"
            )
        parts = self.data_parallel * self.grad_accum
        if self.batch % parts:
            sharers = f"{self.ranks} ranks"
            if self.tensor_parallel > 1:
                groups = "group" if self.data_parallel == 1 else "groups"
                sharers = f"{self.data_parallel} {groups} of {self.tensor_parallel} ranks"
            raise ValueError(
                f"--batch {self.batch}: cannot be divided over {sharers} × {self.grad_accum} micro-steps; "
                f"needed a multiple of {parts}. Write: --batch {math.ceil(self.batch / parts) * parts}"
            )
        if self.warmup >= self.steps:
            raise ValueError(
                f"--warmup {self.warmup}: leaves none of the {self.steps} steps. Write: --warmup {self.steps // 10}"
            )

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each layer, and so read the same sequences."""
        return tensor_parallel_ranks(self.parallel, self.ranks)

    @property
    def zero(self) -> int:
        """Stage of ZeRO under DeepSpeed's engine; 0 without it."""
        return int(self.parallel.removeprefix("zero")) if self.parallel.startswith("zero") else 0

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of ranks that share each layer, that read sequences of their own."""
        return self.ranks // self.tensor_parallel

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass of one rank."""
        return self.batch // (self.data_parallel * self.grad_accum)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks."""
        return self.batch * self.seq

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """What is trained, in order."""
        return ("muon", "adamw") if self.optimizer == "both" else (self.optimizer,)

    def lr_of(self, optimizer: Optimizer) -> float:
        """The peak learning rate of one of the trainings."""
        return self.lr if optimizer == "muon" else self.adamw_lr

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return Path(self.out)

    def save(self, environment: dict[str, Any]) -> None:
        """Write ``config.json``: the settings, and under ``environment`` what else a reader may want to know."""
        content = {**asdict(self), "environment": environment}
        (self.directory / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def load_settings(directory: Path, **changes: Any) -> Settings:
    """Read a run's settings back, with ``changes`` made to them.

    Raises:
        ValueError: ``directory`` holds no run, or one that another version wrote.
    """
    content = load_config(directory)
    content.pop("environment", None)
    unknown = set(content) - {f.name for f in fields(Settings)}
    if unknown:
        raise ValueError(f"{directory / CONFIG_FILE}: unknown settings {sorted(unknown)}; another version wrote it.")
    content["data"] = tuple(content.get("data", ()))
    return replace(Settings(**content), **changes)


def load_config(directory: Path) -> dict[str, Any]:
    """The whole ``config.json``, environment included; a ValueError where there is none."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: found no {CONFIG_FILE}; needed the directory of a run, such as runs/NAME.")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def tensor_parallel_ranks(parallel: Parallel, ranks: int) -> int:
    """How many of ``ranks`` share each layer."""
    match parallel:
        case "tp":
            return ranks
        case "fsdp+tp":
            return PAIR
        case _:
            return 1


def option(name: str) -> str:
    """The command-line option of a setting: ``grad_accum`` is ``--grad-accum``."""
    return "--" + name.replace("_", "-")


_LEAST = {
    "ranks": 1,
    "steps": 1,
    "warmup": 0,
    "batch": 1,
    "seq": 2,
    "grad_accum": 1,
    "vocab": 257,  # the 256 bytes and the end-of-text mark
    "seed": 0,
    "eval_every": 1,
    "eval_sequences": 1,
    "checkpoint_every": 0,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": get_args(OptimizerChoice),
    "parallel": get_args(Parallel),
    "device": get_args(Device),
    "dtype": get_args(Dtype),
    "schedule": get_args(ScheduleName),
}
