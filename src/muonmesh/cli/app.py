"""App: the commands and their options, and what happens before and after the ranks run."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from muonmesh.cli import options
from muonmesh.cli.doctor import doctor
from muonmesh.cli.lock import RunLock
from muonmesh.cli.plan import plan
from muonmesh.cli.settings import (
    CONFIG_FILE,
    Parallel,
    Settings,
    load_config,
    load_settings,
    tensor_parallel_ranks,
)
from muonmesh.cli.terminal import complain, make_console

if TYPE_CHECKING:
    from muonmesh.cli.corpus import Corpus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Muon for PyTorch that computes the same update whatever holds the matrix.",
)

MAY_CHANGE_ON_RESUME = {"ranks", "parallel"}  # a checkpoint has no world size


app.command()(plan)
app.command()(doctor)


@app.command()
def train(
    context: typer.Context,
    data: options.Data = None,
    text_field: options.TextField = Settings.text_field,
    model: options.Model = Settings.model,
    init: options.Init = None,
    tokenizer: options.Tokenizer = None,
    vocab: options.Vocab = Settings.vocab,
    seq: options.Seq = Settings.seq,
    optimizer: options.OptimizerOption = Settings.optimizer,
    steps: options.Steps = Settings.steps,
    batch: options.Batch = None,
    grad_accum: options.GradAccum = Settings.grad_accum,
    lr: options.Lr = Settings.lr,
    adamw_lr: options.AdamwLr = Settings.adamw_lr,
    schedule: options.ScheduleOption = Settings.schedule,
    warmup: options.Warmup = None,
    weight_decay: options.WeightDecay = Settings.weight_decay,
    clip: options.Clip = Settings.clip,
    seed: options.Seed = Settings.seed,
    ranks: options.Ranks = None,
    parallel: options.ParallelOption = Settings.parallel,
    engine: options.Engine = "torch",
    zero: options.Zero = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    checkpoint_activations: options.CheckpointActivations = False,
    compile: options.Compile = False,
    out: options.Out = None,
    eval_every: options.EvalEvery = None,
    eval_sequences: options.EvalSequences = Settings.eval_sequences,
    checkpoint_every: options.CheckpointEvery = Settings.checkpoint_every,
    keep: options.Keep = Settings.keep,
    resume: options.Resume = None,
    save_momentum: options.SaveMomentum = None,
    export: options.Export = False,
    log: options.Log = None,
    sweep: options.Sweep = None,
    seeds: options.Seeds = None,
    dry_run: options.DryRun = False,
) -> None:
    """Train a language model with Muon, with AdamW, or with both from the same start, and compare them.

    Without options: a small Llama learns the sources of the Python standard library.

    Two ranks (or every GPU) under FSDP2 train it with Muon, then again with AdamW.

    Ctrl-C stops after the current step and leaves a checkpoint.
    """
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    try:
        parallel = _parallel(parallel, engine, zero, given)
        if given & {"engine", "zero"}:
            given = (given | {"parallel"}) - {"engine", "zero"}
        going_on = _going_on(resume, out)
        if going_on is not None and resume != "auto":
            settings = _resumed(going_on, given, ranks=ranks, parallel=parallel)
        else:
            settings = _new(
                data=tuple(data or ()),
                text_field=text_field,
                model=_model(model, init, given),
                init=init,
                tokenizer=tokenizer,
                vocab=_vocabulary(vocab, init, tokenizer, given),
                seq=seq,
                optimizer=optimizer,
                steps=steps,
                batch=batch,
                grad_accum=grad_accum,
                lr=lr,
                adamw_lr=adamw_lr,
                schedule=schedule,
                warmup=warmup,
                weight_decay=weight_decay,
                clip=clip,
                seed=seed,
                ranks=ranks,
                parallel=parallel,
                device=device,
                dtype=dtype,
                checkpoint_activations=checkpoint_activations,
                compile=compile,
                out=out,
                eval_every=eval_every,
                eval_sequences=eval_sequences,
                checkpoint_every=checkpoint_every,
                keep=keep,
                save_momentum=save_momentum,
                export=export,
                log=tuple(dict.fromkeys(log or ())),
            )
        if going_on is not None and resume == "auto":
            settings = _repeated(going_on, settings, given)
        run, resuming = settings.directory, going_on is not None
        if sweep is not None or seeds is not None:
            raise SystemExit(_sweep(settings, sweep, seeds, resume=resume, dry_run=dry_run))
        parameters = _check(run, settings, resuming=resuming)
        if dry_run:
            from muonmesh.cli.preview import preview

            preview(settings, parameters)
            return
        with RunLock(run, option="--resume" if resuming else "--out"):
            _prepare(run, settings, parameters, resuming=resuming)
            raise SystemExit(_run(run, settings))
    except ValueError as error:
        raise SystemExit(complain("train", str(error), code=2)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise SystemExit(complain("train", f"{where}{error.strerror or error}", code=2)) from error


def _parallel(parallel: Parallel, engine: str, zero: int | None, given: set[str]) -> Parallel:
    """Return how the model is spread, from the options that say so."""
    if engine == "torch":
        if zero is not None:
            raise ValueError(f"--zero {zero}: is DeepSpeed's. Write: --engine deepspeed --zero {zero}")
        if parallel.startswith("zero"):
            _need_deepspeed()
        return parallel
    if "parallel" in given:
        raise ValueError(f"--engine deepspeed: found --parallel {parallel} beside it. Leave out one of them")
    _need_deepspeed()
    stages: dict[int | None, Parallel] = {1: "zero1", 2: "zero2", 3: "zero3", None: "zero2"}
    return stages[zero]


def _need_deepspeed() -> None:
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--engine deepspeed: found no deepspeed. Write: pip install 'muonmesh[deepspeed]'")


def _new(
    *,
    model: str,
    batch: int | None,
    grad_accum: int,
    steps: int,
    warmup: int | None,
    eval_every: int | None,
    ranks: int | None,
    parallel: Parallel,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "bf16", "fp32"],
    out: Path | None,
    **rest: Any,
) -> Settings:
    """Settings with everything resolved that was left to the machine."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: found no GPU. Write: --device cpu")
    if ranks is None:
        ranks = gpus if device == "cuda" else 2
    if device == "cuda" and ranks > gpus:
        raise ValueError(f"--ranks {ranks}: found {gpus} GPUs, and each rank needs one. Write: --ranks {gpus}")
    if dtype == "auto":
        dtype = "bf16" if _has_bf16(device) else "fp32"
    if batch is None:
        readers = ranks // (tensor_parallel_ranks(parallel, ranks) or 1)
        parts = max(1, readers * grad_accum)
        batch = -(-Settings.batch // parts) * parts
    if out is None:
        out = Path("runs") / f"{Path(model).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return Settings(
        out=str(out),
        model=model,
        batch=batch,
        grad_accum=grad_accum,
        steps=steps,
        warmup=steps // 10 if warmup is None else warmup,
        eval_every=max(1, steps // 20) if eval_every is None else eval_every,
        ranks=ranks,
        parallel=parallel,
        device=device,
        dtype=dtype,
        **rest,
    )


def _sweep(base: Settings, sweep: str | None, seeds: str | None, *, resume: str | None, dry_run: bool) -> int:
    """Train everything that a sweep asks for and is not finished yet, report, and return the exit code."""
    from muonmesh.cli.sweep import best_of, finished, parse_sweep, write_sweep

    if sweep is None:
        raise ValueError(f"--seeds {seeds}: found no --sweep beside it. Write: --sweep lr={base.lr:g} --seeds {seeds}")
    if resume not in (None, "auto") or dry_run or base.save_momentum is not None:
        found = "--resume" if resume not in (None, "auto") else "--dry-run" if dry_run else "--save-momentum"
        raise ValueError(f"--sweep {sweep}: found {found} beside it, which is of one run. Leave it out")
    trials = parse_sweep(sweep, seeds, base)
    if resume is None and os.path.lexists(base.directory) and os.listdir(base.directory):
        raise ValueError(
            f"--out {base.out}: already there. Write: --resume auto beside the same --sweep, or another --out"
        )
    for trial in trials:
        if list(finished(base, [trial])):
            continue
        settings = trial.settings(base)
        resuming = (settings.directory / CONFIG_FILE).is_file()
        if resuming:
            settings = load_settings(settings.directory, out=settings.out)
        parameters = _check(settings.directory, settings, resuming=resuming)
        with RunLock(settings.directory, option="--out"):
            _prepare(settings.directory, settings, parameters, resuming=resuming)
            code = _run(settings.directory, settings)
        if code:
            return code
    done = list(finished(base, trials))
    page = write_sweep(base, done)
    console = make_console()
    for line in best_of(done):
        console.print(f"[bold]{line}[/bold]", soft_wrap=True)
    console.print(f"Sweep: {page}", soft_wrap=True)
    return 0


def _going_on(resume: str | None, out: Path | None) -> Path | None:
    """Return the directory of the run to go on with, if there is one."""
    if resume != "auto":
        return None if resume is None else Path(resume)
    if out is None:
        raise ValueError("--resume auto: found no --out beside it, where the run is or will be. Write: --out runs/NAME")
    return out if (out / CONFIG_FILE).is_file() else None


def _model(model: str, init: str | None, given: set[str]) -> str:
    """Return the model that is trained: that of ``--init``, if there is one."""
    if init is None:
        return model
    if "model" in given:
        raise ValueError(f"--init {init}: found --model {model} beside it; its own model is trained. Leave out one")
    return init


def _vocabulary(vocab: int, init: str | None, tokenizer: str | None, given: set[str]) -> int:
    """Return the size of the vocabulary: of the tokenizer that is there, or of the one that is to be trained."""
    folder = tokenizer or init
    if folder is None:
        return vocab
    from muonmesh.cli.tokenizer import load_tokenizer

    if "vocab" in given:
        name = "--init" if tokenizer is None else "--tokenizer"
        raise ValueError(
            f"{name} {folder}: found --vocab {vocab} beside it; a tokenizer has its size. Leave out --vocab"
        )
    return load_tokenizer(folder).size


def _repeated(run: Path, asked: Settings, given: set[str]) -> Settings:
    """Return the settings of a run that is there already, which the same command has been given for again."""
    from muonmesh.cli.settings import option

    before = load_settings(run, out=str(run))
    for name in sorted(given & {field.name for field in fields(Settings)} - MAY_CHANGE_ON_RESUME - {"out"}):
        if getattr(before, name) != getattr(asked, name):
            raise ValueError(
                f"--resume auto: found {option(name)} {getattr(asked, name)}, and {getattr(before, name)} in the run "
                f"of {run}; needed the same. Leave it out, or choose another --out"
            )
    return replace(before, **{name: getattr(asked, name) for name in given & MAY_CHANGE_ON_RESUME})


def _resumed(run: Path, given: set[str], *, ranks: int | None, parallel: Parallel) -> Settings:
    from muonmesh.cli.settings import option

    refused = sorted(option(name) for name in given - MAY_CHANGE_ON_RESUME - {"resume"})
    if refused:
        raise ValueError(
            f"--resume {run}: goes on with the settings of that run; found {', '.join(refused)} beside it. "
            "Leave them out, or start a new run."
        )
    changes: dict[str, Any] = {"out": str(run)}
    if "ranks" in given:
        changes["ranks"] = ranks
    if "parallel" in given:
        changes["parallel"] = parallel
    return load_settings(run, **changes)


def _check(run: Path, settings: Settings, *, resuming: bool) -> int:
    """What can be found wrong before anything is written; returns the number of the model's parameters."""
    from muonmesh.checkpoint.manifest import check_copy
    from muonmesh.cli.lock import LOCK_FILE
    from muonmesh.cli.memory import check_memory
    from muonmesh.cli.metrics import read_metrics
    from muonmesh.cli.model import check_model
    from muonmesh.cli.sinks import check_sinks

    if resuming:
        read_metrics(run)
    elif os.path.lexists(run) and (not run.is_dir() or set(os.listdir(run)) - {LOCK_FILE}):
        raise ValueError(f"--out {run}: already there. Write: --resume {run}, or another --out")
    if settings.init is not None:
        check_copy(Path(settings.init))
    parameters = check_model(
        settings.model,
        vocab=settings.vocab,
        seq=settings.seq,
        tensor_parallel=settings.tensor_parallel,
        parallel=settings.parallel,
        init=settings.init,
        recompute=settings.checkpoint_activations,
    )
    check_memory(parameters, settings)
    check_sinks(settings.log)
    return parameters


def _prepare(run: Path, settings: Settings, parameters: int, *, resuming: bool) -> None:
    """The rest of what can fail without ranks: the text, and what is written."""
    from muonmesh.cli.corpus import load_corpus_of, prepare_corpus, save_corpus_of
    from muonmesh.files import check_writable

    console = make_console()
    if settings.save_momentum is not None:
        check_writable(Path(settings.save_momentum), option="--save-momentum")
    before = load_corpus_of(run) if resuming else None
    status = (
        console.status("Reading text and training a tokenizer") if console.is_terminal else contextlib.nullcontext()
    )
    with status:
        corpus = prepare_corpus(
            settings.data,
            vocab=settings.vocab,
            cache=run.parent / ".text",
            tokenizer=settings.tokenizer or settings.init,
            field=settings.text_field,
        )
    for name, tokens in (("learn from", corpus.train_tokens), ("hold out", corpus.validation_tokens)):
        if tokens <= settings.seq:
            raise ValueError(
                f"--data {corpus.source}: found {tokens} tokens to {name}; needed more than {settings.seq}, the length "
                "of one sequence. Give more text or a smaller --seq."
            )
    if before is not None and before.digest != corpus.digest:
        raise ValueError(
            f"--resume {run}: the text of {corpus.source} has changed since; needed the files it began with."
        )
    settings.save(load_config(run)["environment"] if resuming else _environment())
    save_corpus_of(run, corpus)
    console.print(_headline(settings, parameters, corpus), soft_wrap=True)


def _headline(settings: Settings, parameters: int, corpus: Corpus) -> str:
    backend = "NCCL" if settings.device == "cuda" else "gloo"
    return "; ".join(
        (
            f"[bold]{settings.model}[/bold], {parameters / 1e6:.1f}M parameters",
            f"{corpus.source}, {corpus.files} files, {corpus.train_tokens / 1e6:.2f}M tokens to learn from, "
            f"{corpus.validation_tokens / 1e6:.2f}M held out",
            f"{settings.steps} steps of {settings.tokens_per_step} tokens",
            f"{settings.ranks} ranks, {settings.parallel.upper()} over {backend}, {settings.dtype}",
            f"into {settings.out}",
        )
    )


def _run(run: Path, settings: Settings) -> int:
    """Launch the ranks, report, and return the exit code."""
    from muonmesh.cli.checkpoints import checkpoints_of, latest_step
    from muonmesh.cli.launch import Interrupted, RankFailed, launch
    from muonmesh.cli.report import write_report
    from muonmesh.errors import FileError

    stopped = False
    try:
        launch(run, ranks=settings.ranks)
    except RankFailed as error:
        return complain("train", str(error), code=1)
    except (Interrupted, KeyboardInterrupt):
        stopped = True
    # A rank may also have been asked to stop on its own; then all of them did.
    stopped = stopped or any(latest_step(checkpoints_of(run, name)) != settings.steps for name in settings.optimizers)
    try:
        report = write_report(run, settings)
    except FileError as error:
        return complain("train", f"{error}. The training itself is whole", code=1)
    console = make_console()
    if stopped:
        console.print(f"Stopped. Go on with: muonmesh train --resume {run}", soft_wrap=True)
    if report is not None:
        console.print(f"Report: {report}", soft_wrap=True)
    return 130 if stopped else 0


def _environment() -> dict[str, Any]:
    import platform
    import shlex

    import torch
    import transformers

    from muonmesh.cli.launch import usable_cores

    return {
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


def _has_bf16(device: str) -> bool:
    """Whether products in bf16 are faster than in fp32; elsewhere they are emulated and slower."""
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
