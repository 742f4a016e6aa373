"""Run: one run, from its settings to its report: checks settings, prepares text, starts the ranks, and reports."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from muonmesh.errors import FileError
from muonmesh.files import writing
from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step, without_checkpoint
from muonmesh.tools.cli.configuration import model_config
from muonmesh.tools.cli.corpus import Corpus, load_corpus_of, prepare_corpus, save_corpus_of
from muonmesh.tools.cli.launch import RankFailed, RankKilled, launch, usable_cores
from muonmesh.tools.cli.lock import check_new, locked
from muonmesh.tools.cli.metrics_log import read_metrics
from muonmesh.tools.cli.model import check_model
from muonmesh.tools.cli.report import write_report
from muonmesh.tools.cli.run_settings import Settings, load_config
from muonmesh.tools.cli.terminal import complain, make_console, note, say, shell_line
from muonmesh.tools.cli.tokenizer import END_OF_TEXT


def train_run(settings: Settings, *, resuming: bool) -> int:
    """Run the trainings of the settings, write the report, and return the exit code.

    Raises:
        ValueError: an error that can be found without starting ranks.
    """
    run = settings.directory
    if resuming:
        read_metrics(run)
    else:
        check_new(run)
    parameters = sum(p.numel() for p in check_model(settings).parameters())
    corpus = _read(settings, load_corpus_of(run) if resuming else None)
    with locked(run, option="--resume" if resuming else "--out"):
        settings.save(load_config(run)["environment"] if resuming else _environment(settings))
        save_corpus_of(run, corpus)
        save_model(settings, corpus)
        for line in without_checkpoint(run):
            note(f"{run}: {line}")
        say(_headline(settings, parameters, corpus))
        return _launch(run, settings)


def _read(settings: Settings, before: Corpus | None) -> Corpus:
    """Return the corpus of a run; if the run continues, it must equal the corpus ``before``.

    Raises:
        ValueError: the text has changed, or is too short.
    """
    with make_console().status("Reading text and training a tokenizer"):
        cache = settings.directory.parent / ".text"
        corpus = prepare_corpus(settings.data, vocab=settings.vocab, cache=cache, field=settings.text_field)
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
    with writing(folder, raised=Exception):
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _headline(settings: Settings, parameters: int, corpus: Corpus) -> str:
    return (
        f"{settings.model}, {parameters:,} parameters; {corpus.source}, {corpus.files} files, "
        f"{corpus.train_tokens:,} tokens to learn from, {corpus.validation_tokens:,} held out; "
        f"{settings.steps} steps of {settings.tokens_per_step} tokens; ranks: {settings.ranks}, "
        f"{settings.parallel.upper()} on {settings.device}, {settings.dtype}; into {settings.out}"
    )


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
    where = f"from step {latest[name]}" if latest[name] else "from the start, since it has no checkpoint"
    return f"Continue {name} {where}: {shell_line('train', '--resume', run)}"


def _environment(settings: Settings) -> dict[str, Any]:
    return {
        "digest": settings.digest,
        "command": shlex.join(["muonmesh", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {usable_cores()} cores",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "cores divided by ranks"),
    }
