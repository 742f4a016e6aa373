"""Settings: everything that decides what a run computes, checked before any rank starts."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from muonmesh.cli.failure import RunError
from muonmesh.files import is_finite, is_number, is_whole, read_json, write_text

Optimizer = Literal["muon", "adamw"]
OptimizerChoice = Literal["muon", "adamw", "both"]
Parallel = Literal["ddp", "fsdp", "hsdp", "tp", "fsdp+tp", "zero1", "zero2", "zero3"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["bf16", "fp32"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
Logger = Literal["jsonl", "tensorboard", "wandb"]

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
    keep: int = 1
    save_momentum: str | None = None
    text_field: str = "text"
    tokenizer: str | None = None
    init: str | None = None
    export: bool = False
    checkpoint_activations: bool = False
    compile: bool = False
    log: tuple[Logger, ...] = ()

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ValueError(f"{option(name)} {value}: needed a whole number of at least {least}.")
            if value > (most := _MOST.get(name, MOST)):
                raise ValueError(f"{option(name)} {value}: needed a whole number of at most {most}.")
        given = [name for name in ("save_momentum", "tokenizer", "init") if getattr(self, name) is not None]
        for name in ("out", "model", "text_field", *given):
            if not isinstance(getattr(self, name), str) or "\0" in getattr(self, name):
                raise ValueError(f"{option(name)} {getattr(self, name)!r}: needed text.")
        if not isinstance(self.data, tuple) or not all(isinstance(p, str) and "\0" not in p for p in self.data):
            raise ValueError(f"--data {self.data!r}: needed names of files, folders or globs.")
        for name in ("export", "checkpoint_activations", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{option(name)} {getattr(self, name)!r}: needed true or false.")
        if not isinstance(self.log, tuple) or not set(map(str, self.log)) <= set(get_args(Logger)):
            raise ValueError(f"--log {self.log!r}: needed some of {', '.join(get_args(Logger))}.")
        for name in ("lr", "adamw_lr"):
            value = getattr(self, name)
            if not (is_finite(value) and value > 0):
                raise ValueError(f"{option(name)} {value}: needed a positive, finite learning rate.")
        if not is_number(self.clip) or self.clip < 0:
            raise ValueError(f"--clip {self.clip}: needed zero or more.")
        if not is_finite(self.weight_decay) or self.weight_decay < 0:
            raise ValueError(f"--weight-decay {self.weight_decay}: needed zero or more, and finite.")
        for name, choices in _CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise ValueError(f"{option(name)} {getattr(self, name)!r}: needed one of {', '.join(choices)}.")
        if self.compile and (self.tensor_parallel > 1 or self.zero):
            raise ValueError(f"--compile: found --parallel {self.parallel}; needed ddp, fsdp or hsdp. Leave out one")
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
        if self.save_momentum is not None and self.optimizer == "adamw":
            raise ValueError(
                f"--save-momentum {self.save_momentum}: --optimizer adamw has no momentum of Muon. Leave one out"
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
        """Write ``config.json``: the settings, and under ``environment`` what else a reader may want to know.

        Raises:
            RunError: it could not be written; an older one is as it was.
        """
        content = {**asdict(self), "environment": environment}
        write_text(self.directory / CONFIG_FILE, json.dumps(content, indent=2) + "\n")


def load_settings(directory: Path, **changes: Any) -> Settings:
    """Read a run's settings back, with ``changes`` made to them.

    Raises:
        RunError: ``directory`` holds no run, or one that another version or an editor wrote.
        ValueError: ``changes`` do not go with it.
    """
    path = directory / CONFIG_FILE
    content = load_config(directory)
    del content["environment"]
    known = [field.name for field in fields(Settings)]
    unknown = sorted(set(content) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" The nearest known one is {near[0]!r}." if near else ""
        raise RunError(f"{path}: unknown settings {unknown}; another version wrote it.{hint}")
    missing = [name for name in known if name not in content and name not in LATER]
    if missing:
        raise RunError(f"{path}: found no {missing[0]!r}; needed the file as the run wrote it")
    content.setdefault("log", [])
    for name in ("data", "log"):
        if not isinstance(content[name], list):
            raise RunError(f"{path}: found {name} {content[name]!r}; needed a list of names")
        content[name] = tuple(content[name])
    try:
        settings = Settings(**content)
    except ValueError as error:
        raise RunError(f"{path}: {error}") from error
    return replace(settings, **changes)


def load_config(directory: Path) -> dict[str, Any]:
    """The whole ``config.json``, environment included; a RunError where there is none, or not an object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{directory}: found no {CONFIG_FILE}; needed the directory of a run, such as runs/NAME.")
    content = read_json(path, needed="the settings of a run")
    if not isinstance(content.get("environment"), dict):
        raise RunError(f"{path}: found no object 'environment'; needed the file as the run wrote it")
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


# What runs of older versions do not say; they did what these settings do when they are left out.
LATER = ("text_field", "tokenizer", "init", "export", "checkpoint_activations", "compile", "log", "keep")
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
    "keep": 1,
}
MOST = 2**31 - 1  # beyond it, sizes and positions stop being exact or possible
_MOST = {"steps": 99_999_999, "seed": 2**63 - 1}  # the digits of a checkpoint's name; what torch takes as a seed
_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": get_args(OptimizerChoice),
    "parallel": get_args(Parallel),
    "device": get_args(Device),
    "dtype": get_args(Dtype),
    "schedule": get_args(ScheduleName),
}
