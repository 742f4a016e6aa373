"""Run: one run, from the options on the command line to its report: settings, text, ranks, and the figures."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from muonmesh.errors import FileError
from muonmesh.files import writing
from muonmesh.table import aligned
from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step, without_checkpoint
from muonmesh.tools.cli.corpus import (
    DESCRIPTION_FILE,
    END_OF_TEXT,
    Corpus,
    load_corpus_of,
    prepare_corpus,
    save_corpus_of,
)
from muonmesh.tools.cli.launch import RankFailed, RankKilled, launch, usable_cores
from muonmesh.tools.cli.model import check_model, model_config
from muonmesh.tools.cli.report import facts_of, read_metrics, write_report
from muonmesh.tools.cli.run_files import check_new, locked
from muonmesh.tools.cli.run_settings import (
    CONFIG_FILE,
    MAY_CHANGE_ON_RESUME,
    Settings,
    load_config,
    load_settings,
    option,
)
from muonmesh.tools.cli.terminal import complain, make_console, note, say, shell_line


def settings_from_options(values: dict[str, Any], resume: str | None, typed: set[str]) -> tuple[Settings, bool]:
    """Return the settings of a run, and whether the run exists and continues.

    Args:
        values: The values of all options that are settings. For None and "auto", the machine decides.
        resume: The value of ``--resume``.
        typed: The names of the options that the user gave.

    Raises:
        ValueError: an option has a wrong value, or contradicts another option.
    """
    run = values["out"] if resume in (None, "auto") else Path(resume)
    if resume == "auto" and run is None:
        raise ValueError(
            "--resume auto: found no --out; needed the directory where the run is or will be. Write: --out runs/NAME"
        )
    if resume is None or (resume == "auto" and not (run / CONFIG_FILE).is_file()):
        return _new(values), False
    return _resumed(run, values, typed), True


def _new(values: dict[str, Any]) -> Settings:
    """Return the settings of a new run, with values for all options that the machine decides."""
    resolved = {**values, "data": tuple(values["data"] or ())}

    def resolve(name: str, value: Any) -> None:
        resolved[name] = value if resolved[name] in (None, "auto") else resolved[name]

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    resolve("device", "cuda" if gpus else "cpu")
    on_gpus = resolved["device"] == "cuda"
    if on_gpus and not gpus:
        raise ValueError("--device cuda: found no GPU. Write: --device cpu")
    resolve("ranks", gpus if on_gpus else 2)
    ranks, steps = resolved["ranks"], resolved["steps"]
    if on_gpus and ranks > gpus:
        raise ValueError(f"--ranks {ranks}: found {gpus} GPUs, and each rank needs one. Write: --ranks {gpus}")
    resolve("dtype", "bf16" if _has_bf16(resolved["device"]) else "fp32")
    parts = max(1, ranks * resolved["grad_accum"])
    resolve("batch", -(-Settings.batch // parts) * parts)
    resolve("warmup", steps // 10)
    resolve("eval_every", max(1, steps // 20))
    resolve("out", Path("runs") / f"{Path(resolved['model']).stem}-{datetime.now():%Y%m%d-%H%M%S}")
    return Settings(**{**resolved, "out": str(resolved["out"])})


def _resumed(run: Path, values: dict[str, Any], typed: set[str]) -> Settings:
    """Return the settings of a run that continues, with the changes that are allowed.

    Raises:
        ValueError: an option that may not change has another value than in the run.
    """
    before = load_settings(run, out=str(run))
    if (out := values.get("out")) is not None and out.resolve() != run.resolve():
        raise ValueError(f"--resume {run}: found --out {out}; needed the directory of that run. Leave it out")
    for name in sorted(typed & {field.name for field in fields(Settings)} - MAY_CHANGE_ON_RESUME - {"out"}):
        value = tuple(values[name]) if isinstance(values[name], list) else values[name]
        if value not in ("auto", getattr(before, name)):
            raise ValueError(
                f"--resume {run}: found {option(name)} {value}, and {getattr(before, name)} in that run; needed the "
                "same. Leave it out, or start a new run"
            )
    return replace(before, **{name: values[name] for name in typed & MAY_CHANGE_ON_RESUME})


def _has_bf16(device: str) -> bool:
    """Return whether the device has native bf16 products, which are faster than fp32. Emulated products are slower."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def train_run(settings: Settings, *, resuming: bool) -> int:
    """Run the trainings of the settings, write the report, and return the exit code.

    Raises:
        ValueError: an error that can be found without starting ranks.
    """
    run, before = settings.directory, None
    if not resuming:
        check_new(run)
    # A run that ended before its first step, as on a full disk, may have its settings and no description of a text.
    elif read_metrics(run) or os.path.lexists(run / DESCRIPTION_FILE):
        before = load_corpus_of(run)
    parameters = f"{sum(p.numel() for p in check_model(settings).parameters()):,}"
    corpus = _read(settings, before)
    with locked(run, option="--resume" if resuming else "--out"):
        settings.save(load_config(run)["environment"] if resuming else _environment(settings, parameters))
        save_corpus_of(run, corpus)
        save_model(settings, corpus)
        for line in without_checkpoint(run):
            note(f"{run}: {line}")
        say(*aligned([*facts_of(run, settings).items()]))
        return _launch(run, settings)


def _read(settings: Settings, before: Corpus | None) -> Corpus:
    """Return the corpus of a run; if the run continues, it must equal the corpus ``before``.

    Raises:
        ValueError: the text has changed, or is too short.
    """
    with make_console().status("Reading text and training a tokenizer"):
        cache = settings.directory.parent / ".text"
        corpus = prepare_corpus(settings.data, vocab=settings.vocab, cache=cache)
    for name, tokens in (("learn from", corpus.train_tokens), ("hold out", corpus.validation_tokens)):
        if tokens <= settings.seq:
            raise ValueError(
                f"--data {corpus.source}: found {tokens} tokens to {name}; needed more than {settings.seq}, the length "
                "of one sequence. Give more text or a smaller --seq."
            )
    if before is not None and before.digest != corpus.digest:
        raise ValueError(
            f"--resume {settings.out}: the text of {corpus.source} has changed since; needed the files it began with."
        )
    return corpus


def save_model(settings: Settings, corpus: Corpus) -> None:
    """Write the model's configuration and its tokenizer into the run, so that `transformers` can build the model.

    Raises:
        FileError: the tokenizer is missing, or the files cannot be written.
    """
    folder = settings.directory / "model"
    config = model_config(settings.model, vocab=corpus.vocab, seq=settings.seq)
    config.dtype = torch.float32  # of the weights
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer(), eos_token=END_OF_TEXT)
    # By way of another folder: tokenizers cannot write to a path that is no valid text, as "×" is in an ASCII locale.
    with writing(folder, raised=Exception), tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # As readable as the run, unlike a temporary folder, whose mode copytree would copy.
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(scratch).iterdir():
            shutil.copyfile(file, folder / file.name)


def _launch(run: Path, settings: Settings) -> int:
    """Launch the ranks, write the report, and return the exit code."""
    try:
        launch(run, ranks=settings.ranks)
    except RankKilled as error:
        return complain("train", f"{error}. {continuation(run, settings)}", code=1)
    except RankFailed as error:
        return complain("train", *str(error).split("\n"), code=1)
    except KeyboardInterrupt:
        pass  # the run may be complete all the same
    # A signal may also have reached a rank directly; then all ranks have stopped.
    stopped = any(latest_step(checkpoints_of(run, name)) != settings.steps for name in settings.optimizers)
    try:
        report = write_report(run, settings)
    except FileError as error:
        return complain("train", f"{error}. The training itself is whole", code=1)
    if stopped:
        say(f"Stopped. {continuation(run, settings)}")
    if report is not None:
        say(f"Report: {report}")
    return 130 if stopped else 0


def continuation(run: Path, settings: Settings) -> str:
    """Return the sentence that says how to continue a run that has stopped, and from which step."""
    latest = {name: latest_step(checkpoints_of(run, name)) for name in settings.optimizers}
    name = next((name for name, step in latest.items() if step != settings.steps), settings.optimizers[-1])
    beginning = f"from step {latest[name]}" if latest[name] else "from the start, since it has no checkpoint"
    return f"Continue {name} {beginning}: {shell_line('train', '--resume', run)}"


def _environment(settings: Settings, parameters: str) -> dict[str, Any]:
    return {
        "digest": settings.digest,
        "command": shlex.join(["muonmesh", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "parameters": parameters,
        "muonmesh": version("muonmesh"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {usable_cores()} cores",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "cores divided by ranks"),
    }
