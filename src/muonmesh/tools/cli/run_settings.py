"""Settings: the settings of a run, each declared once with its name, type, default, check and help text.

The commands make their options from the fields. `config.json` contains the settings of a run of `muonmesh train`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import types
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from muonmesh.errors import FileError
from muonmesh.files import is_finite, is_integer, read_json, write_text

Optimizer = Literal["muon", "adamw"]
OptimizerChoice = Literal["muon", "adamw", "both"]
Parallel = Literal["ddp", "fsdp", "hsdp"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["bf16", "fp32"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]

REPLICAS = 2  # of the model, under hsdp
MOST_RANKS = 1024  # 100,000 ranks used up all memory of a machine before one failed
MOST_VOCABULARY = 2**20  # the tokenizers library reserves memory for it, and aborts the process if there is too little
MOST = 2**31 - 1  # beyond it, sizes and positions stop being exact or possible
CONFIG_FILE = "config.json"
MAY_CHANGE_ON_RESUME = {"ranks", "parallel", "timeout"}  # a checkpoint has no world size
PLAIN: dict[type, str] = {bool: "true or false", str: "text", Path: "a path"}  # kinds by their names in messages
WHAT, HOW, WHERE, OUTPUT = "What to learn", "How to learn", "Where to run", "What to keep"


@dataclass(frozen=True)
class Option:
    """The help text and the allowed values of a field's command-line option.

    Attributes:
        help: The help text.
        panel: The heading above the help text; None for the common heading.
        typed: The type on the command line, if the machine or other options decide the value of a missing option.
        least, most: The smallest value of a whole number, and the largest value of any number.
        positive: Whether a number must be above zero.
    """

    help: str
    panel: str | None
    typed: Any = None
    least: int = 1
    most: float = MOST
    positive: bool = False

    def needed(self, kind: Any, value: object) -> str:
        """Return, in words, which values are needed instead of a value; empty if the value is allowed."""
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Literal:
            return "" if value in inner else f"one of {', '.join(inner)}"
        if origin is types.UnionType:
            return "" if value is None else self.needed(inner[0], value)
        if origin is tuple:
            if not isinstance(value, tuple):
                return "a list"
            return next((f"a list, each {why}" for entry in value if (why := self.needed(inner[0], entry))), "")
        if kind in PLAIN:
            return "" if isinstance(value, kind) and "\0" not in str(value) else PLAIN[kind]
        if kind is float:
            good = is_finite(value) and (value > 0 if self.positive else value >= 0)  # type: ignore[operator]
            if not good:
                return "a positive, finite number" if self.positive else "zero or more, and finite"
        elif not is_integer(value) or value < self.least:  # type: ignore[operator]
            return f"a whole number of at least {self.least}"
        return "" if value <= self.most else f"a{'' if kind is float else ' whole'} number of at most {self.most}"  # type: ignore[operator]


def setting(default: Any, panel: str | None, help: str, **of_values: Any) -> Any:
    """Declare a field and its option.

    Args:
        default: The default value; MISSING: the field is required.
        panel: See `Option`.
        help: See `Option`.
        of_values: The other attributes of `Option`.
    """
    return field(default=default, metadata={"option": Option(help, panel, **of_values)})


@functools.cache
def declared(kind: Any) -> dict[str, tuple[Any, Option]]:
    """Return the type and the option of each field of a class whose fields are declared by `setting`, by name."""
    types_of = get_type_hints(kind)
    return {attribute.name: (types_of[attribute.name], attribute.metadata["option"]) for attribute in fields(kind)}


def check_fields_of(values: Any) -> None:
    """Check that each field has an allowed value.

    Raises:
        ValueError: a value is not allowed; the message names the option, the value and the allowed values.
    """
    for name, (kind, rule) in declared(values.__class__).items():
        value = getattr(values, name)
        if needed := rule.needed(kind, value):
            raise ValueError(f"{option(name)} {value!r}: needed {needed}.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run. They have only plain values, so that ``config.json`` can store them for every rank.

    Learning rates are peak values, in the units of AdamW: with Muon's scale mode ``match_rms_adamw``, one rate fits
    Muon's and AdamW's parameters. ``batch`` counts sequences per optimizer step over **all** ranks, so a run computes
    the same update with any number of ranks.

    Raises:
        ValueError: a value is out of range; the message names the option, the value and the allowed values.
    """

    data: tuple[str, ...] = setting(
        (),
        WHAT,
        "Files, folders or globs of text. You can repeat this option. Default: the Python standard library.",
        typed=list[str] | None,
    )
    model: str = setting(
        "small",
        WHAT,
        "A preset (nano, small, medium, large, xl), a config.json of transformers, a folder with such a file, or a "
        "model type (gpt2).",
    )
    # At least the 256 bytes and the end-of-text mark.
    vocab: int = setting(
        2048, WHAT, "The vocabulary size of the tokenizer that is trained.", least=257, most=MOST_VOCABULARY
    )
    seq: int = setting(128, WHAT, "Tokens per sequence.", least=2)
    optimizer: OptimizerChoice = setting(
        "both", HOW, "Which optimizer to train with. both trains twice from the same weights."
    )
    steps: int = setting(600, HOW, "The number of optimizer steps.", most=99_999_999)  # digits of a checkpoint's name
    batch: int = setting(
        16,
        HOW,
        "Sequences per step over all ranks. Default: 16, or the next multiple of the ranks.",
        typed=int | None,
    )
    grad_accum: int = setting(1, HOW, "Forward and backward passes per step (gradient accumulation).")
    lr: float = setting(
        6e-3, HOW, "Peak learning rate when training with Muon, for matrices and all other weights.", positive=True
    )
    adamw_lr: float = setting(3e-3, HOW, "Peak learning rate when training with AdamW.", positive=True)
    schedule: ScheduleName = setting(
        "cosine", HOW, "The schedule after warmup. wsd is constant, then decays in the last fifth."
    )
    warmup: int = setting(60, HOW, "Steps of linear warmup. Default: a tenth of --steps.", typed=int | None, least=0)
    weight_decay: float = setting(0.1, HOW, "Decoupled weight decay of matrices. Vectors are not decayed.")
    clip: float = setting(1.0, HOW, "Clip the gradients of AdamW's weights to this norm. 0 turns clipping off.")
    seed: int = setting(0, HOW, "The seed of weights, data order and dropout.", least=0, most=2**63 - 1)
    ranks: int = setting(2, WHERE, "The number of processes. Default: one per GPU, or 2 on a CPU.", typed=int | None)
    parallel: Parallel = setting(
        "fsdp",
        WHERE,
        "How to distribute the model: fsdp shards it (FSDP2), ddp replicates it, hsdp shards each of two replicas.",
    )
    device: Device = setting("cpu", WHERE, "auto uses GPUs if there are any.", typed=Literal["auto", "cpu", "cuda"])
    dtype: Dtype = setting(
        "bf16",
        WHERE,
        "Data type of forward and backward passes; weights are fp32. auto: bf16 where it is native.",
        typed=Literal["auto", "bf16", "fp32"],
    )
    timeout: int = setting(0, WHERE, "Seconds that a rank waits for the others. 0: torch's own limit.", least=0)
    out: str = setting(MISSING, OUTPUT, "The directory of the run. Default: runs/MODEL-DATE.", typed=Path | None)
    eval_every: int = setting(
        30, OUTPUT, "Steps between two validations. Default: a twentieth of --steps.", typed=int | None
    )
    eval_sequences: int = setting(128, OUTPUT, "Held-out sequences per validation.")
    checkpoint_every: int = setting(
        200, OUTPUT, "Steps between two checkpoints. 0 writes them only at the end and on Ctrl-C.", least=0
    )

    def __post_init__(self) -> None:
        check_fields_of(self)
        if self.ranks > MOST_RANKS:
            needed = f"at most {MOST_RANKS}, since each is a process of this machine"
            raise ValueError(f"--ranks {self.ranks}: needed {needed}. Write: --ranks 2")
        if self.parallel == "hsdp" and self.ranks % REPLICAS:
            write = f"Write: --ranks {self.ranks + 1}"
            raise ValueError(
                f"--ranks {self.ranks}: --parallel hsdp needs a number of ranks that {REPLICAS} divides. {write}"
            )
        parts = self.ranks * self.grad_accum
        if self.batch % parts:
            raise ValueError(
                f"--batch {self.batch}: cannot be divided over {self.ranks} ranks × {self.grad_accum} micro-steps; "
                f"needed a multiple of {parts}. Write: --batch {math.ceil(self.batch / parts) * parts}"
            )
        if self.warmup >= self.steps:
            raise ValueError(
                f"--warmup {self.warmup}: leaves none of the {self.steps} steps. Write: --warmup {self.steps // 10}"
            )

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass of one rank."""
        return self.batch // (self.ranks * self.grad_accum)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks."""
        return self.batch * self.seq

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers to train with, in order."""
        return ("muon", "adamw") if self.optimizer == "both" else (self.optimizer,)

    def lr_of(self, optimizer: Optimizer) -> float:
        """Return the peak learning rate of the training with an optimizer."""
        return self.lr if optimizer == "muon" else self.adamw_lr

    @property
    def digest(self) -> str:
        """A digest of the settings that may not change during a run."""
        fixed = {name: value for name, value in asdict(self).items() if name not in {*MAY_CHANGE_ON_RESUME, "out"}}
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return Path(self.out)

    def save(self, environment: dict[str, Any]) -> None:
        """Write ``config.json``: the settings, and under ``environment`` versions, command, date and machine.

        Raises:
            FileError: the file could not be written; an older file is unchanged.
        """
        content = {**asdict(self), "environment": environment}
        write_text(self.directory / CONFIG_FILE, json.dumps(content, indent=2) + "\n")


def load_settings(directory: Path, **changes: Any) -> Settings:
    """Return the settings of a run from its directory, with some changes.

    Args:
        directory: The run's directory.
        changes: New values of settings, by name.

    Raises:
        FileError: ``directory`` has no run, or another version or an editor has changed its ``config.json``.
        ValueError: ``changes`` have values that are not allowed with the other settings.
    """
    path = directory / CONFIG_FILE
    content = load_config(directory)
    began = content.pop("environment").get("digest")
    names = {field.name for field in fields(Settings)}
    for name in sorted(names ^ content.keys()):
        fault = f"no {name!r}" if name in names else f"{name!r}, which means nothing"
        raise FileError(f"{path}: found {fault}; needed the file as the run wrote it")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
    try:
        settings = Settings(**values)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from error
    if began not in (None, settings.digest):
        needed = "those it began with. Undo the change, or start a new run"
        raise FileError(f"{path}: found settings that were changed after the run had begun; needed {needed}")
    return replace(settings, **changes)


def load_config(directory: Path) -> dict[str, Any]:
    """Return the whole ``config.json`` of a run, with ``environment``.

    Raises:
        FileError: the file is missing, or has no object ``environment``.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileError(f"{directory}: found no {CONFIG_FILE}; needed the directory of a run, such as runs/NAME.")
    content = read_json(path, needed="the settings of a run")
    if not isinstance(content.get("environment"), dict):
        raise FileError(f"{path}: found no object 'environment'; needed the file as the run wrote it")
    return content


def option(name: str) -> str:
    """Return the command-line option of a setting: ``grad_accum`` is ``--grad-accum``."""
    return "--" + name.replace("_", "-")
