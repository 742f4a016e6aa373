"""`muonmesh train`: its parts, its errors, and whole runs on two ranks that are stopped, resumed and compared."""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.studies.orthogonalize import momenta
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from muonmesh.errors import FileError
from muonmesh.tools.cli import launch as launching
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step
from muonmesh.tools.cli.corpus import Windows, divide, find_files, load_corpus_of, prepare_corpus, standard_library
from muonmesh.tools.cli.launch import RankFailed, launch
from muonmesh.tools.cli.model import PRESETS, blocks_of, build_model, model_config
from muonmesh.tools.cli.report import (
    TIMES,
    Point,
    TrainingSummary,
    append_metrics,
    compare,
    crossing_of,
    cut_metrics,
    read_metrics,
    summarise,
)
from muonmesh.tools.cli.run import continuation, save_model, settings_from_options
from muonmesh.tools.cli.run_files import LOCK_FILE, check_new
from muonmesh.tools.cli.run_settings import Settings, load_settings
from muonmesh.tools.cli.training import learning_rate_factor
from tests.support import folders
from tests.support.pages import run as run_page
from tests.support.runs import COMMAND, copy_texts, losses_of, train_command

COVERS = (
    "tools.cli.corpus.prepare_corpus",
    "tools.cli.launch.launch",
    "tools.cli.model.build_model",
    "tools.cli.report.compare",
    "tools.cli.training.learning_rate_factor",
    "tools.cli.worker.main",
    "tools.cli.run.continuation",
    "tools.cli.run.train_run",
)

STEPS = 12
# A whole run in seconds: a narrow model, short sequences, a small tokenizer.
# A validation of 400 sequences takes long enough for a Ctrl-C in it.
TINY = ("--steps", STEPS, "--batch", 8, "--seq", 32, "--vocab", 400, "--eval-every", 4, "--eval-sequences", 400)
TINY += ("--checkpoint-every", 5, "--device", "cpu", "--model", "nano")


# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_warms_up_and_never_exceeds_its_peak(name: Any) -> None:
    factors = [learning_rate_factor(step, name=name, steps=100, warmup=10) for step in range(1, 101)]
    assert factors[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(factors) == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[9:]))
    assert factors[-1] > 0, "the last step would do nothing"


def test_schedules_end_where_they_should() -> None:
    def last(name: Any) -> float:
        return learning_rate_factor(1000, name=name, steps=1000, warmup=0)

    assert last("cosine") == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.999)))
    assert last("linear") == pytest.approx(0.001)
    assert last("wsd") == pytest.approx(0.005)
    assert last("constant") == 1.0
    assert learning_rate_factor(800, name="wsd", steps=1000, warmup=0) == 1.0


# --- corpus -----------------------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def documents(count: int) -> dict[str, str]:
    return {f"{i:03}.txt": f"Document {i} counts to {i * i}.\n" * 30 for i in range(count)}


def test_the_same_text_gives_the_same_tokens_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenized in many parts too."""
    first_folder = write(tmp_path / "here", documents(60))
    renamed = {f"deep/{99 - int(name[:3])}.md": text for name, text in documents(60).items()}
    second_folder = write(tmp_path / "there", renamed)
    first = prepare_corpus([str(first_folder)], vocab=300, cache=tmp_path / "a")
    monkeypatch.setattr("muonmesh.tools.cli.corpus.CHARACTERS_AT_ONCE", 1000)
    second = prepare_corpus([str(second_folder)], vocab=300, cache=tmp_path / "b")
    assert first.digest == second.digest
    assert np.array_equal(first.train(), second.train())
    assert first.train_tokens == len(first.train()) > len(first.validation()) == first.validation_tokens > 0
    write(second_folder, {"deep/0.md": "something else"})
    assert prepare_corpus([str(second_folder)], vocab=300, cache=tmp_path / "b").digest != first.digest


def test_each_file_is_a_document_and_held_out_ones_are_not_learnt_from_even_as_copies(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", {**documents(200), "empty.txt": " "})
    write(folder, {f"copy-{name}": text for name, text in documents(200).items()})
    corpus = prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache")
    assert corpus.files == 201
    decode = corpus.tokenizer().decode
    train, held_out = (
        {decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1)} - {""}
        for tokens in (corpus.train(), corpus.validation())
    )
    assert len(train) + len(held_out) == 200
    assert not train & held_out
    assert {text.removesuffix("<|endoftext|>") for text in train | held_out} == set(documents(200).values())
    assert 2 <= len(held_out) <= 30, "about one file in twenty"


def test_files_that_are_no_text_are_named_and_not_only_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of texts in another encoding was learnt from in part, without a word, and "files" told of all."""
    folder = write(tmp_path / "text", {**documents(2), "empty.txt": " "})
    (folder / "latin.txt").write_bytes("größer\n".encode("latin-1"))
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache")
    told = capsys.readouterr().err
    assert f"ignored 2 of the files, {folder / 'latin.txt'}, {folder / 'picture.png'}; needed UTF-8 text" in told
    for path in (folder / "latin.txt", folder / "picture.png"):
        path.unlink()
    prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache")
    assert capsys.readouterr().err == "", "an empty file has nothing to learn"


def test_a_text_that_was_prepared_in_another_place_is_told_by_the_place_that_was_given(tmp_path: Path) -> None:
    """The report and messages about --data named the folder of the run that had prepared the same text first."""
    folders = [write(tmp_path / name, documents(2)) for name in ("first", "second")]
    prepared = [prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache") for folder in folders]
    assert prepared[0].directory == prepared[1].directory
    assert [corpus.source for corpus in prepared] == [str(folder) for folder in folders]


def test_a_file_that_changes_while_it_is_read_is_not_stored_as_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later runs with the first text were given the second one."""
    folder = write(tmp_path / "text", documents(3))

    def changed(files: Sequence[Path]) -> None:
        (folder / "001.txt").write_text("Something else.\n" * 30)

    with monkeypatch.context() as patch:
        patch.setattr("muonmesh.tools.cli.corpus._tell_ignored", changed)  # called after the first of two readings
        with pytest.raises(FileError, match=r"001\.txt has changed while it was read; needed files that stay"):
            prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache")
    write(folder, documents(3))
    corpus = prepare_corpus([str(folder)], vocab=300, cache=tmp_path / "cache")
    text = corpus.tokenizer().decode([*corpus.train().tolist(), *corpus.validation().tolist()])
    assert "Document 1 counts to 1." in text
    assert "Something else" not in text


def test_a_single_file_holds_out_its_end() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    train, held_out = divide("0" * 64, text, whole=False)
    assert train + held_out == text
    assert 0.03 < len(held_out) / len(text) < 0.07


def test_find_files_takes_files_folders_and_globs(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.py": "a", "sub/b.py": "b", "sub/c.md": "c", ".hidden/d.py": "d"})
    assert {path.name for path in find_files([str(folder)])} == {"a.py", "b.py", "c.md"}
    assert {path.name for path in find_files([f"{folder}/**/*.py"])} == {"a.py", "b.py"}
    assert [path.name for path in find_files([str(folder / "sub/c.md")])] == ["c.md"]
    with pytest.raises(ValueError, match=r"--data .*nothing.*needed a file, a folder or a glob"):
        find_files([str(folder / "nothing")])
    write(tmp_path, {"lines/d.jsonl": '{"text": "d"}', "lines/e.txt": "e"})
    for pattern in ("lines/d.jsonl", "lines", "lines/*"):
        with pytest.raises(ValueError, match=r"--data .*lines/d\.jsonl': found JSON lines; needed plain text\. Write"):
            find_files([str(tmp_path / pattern)])
    assert [path.name for path in find_files([str(tmp_path / "lines/*.txt")])] == ["e.txt"]


def test_the_standard_library_is_there_without_tests_or_installed_packages() -> None:
    files = standard_library()
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)
    assert sum(path.stat().st_size for path in files) > 3_000_000


def test_windows_read_everything_once_an_epoch_in_an_order_of_the_seed_alone() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    windows = Windows(tokens, length=10, seed=3)
    epoch = windows.shuffled(range(100))
    assert epoch.shape == (100, 11)
    assert sorted(epoch[:, 0].tolist()) == list(range(0, 1000, 10))
    assert (epoch[:, 1:] - epoch[:, :-1] == 1).all(), "targets are the inputs, one on"
    assert not np.array_equal(epoch, windows.shuffled(range(100, 200))), "the second epoch has an order of its own"
    assert np.array_equal(windows.shuffled([42, 142]), Windows(tokens, length=10, seed=3).shuffled([42, 142]))
    assert not np.array_equal(epoch, Windows(tokens, length=10, seed=4).shuffled(range(100)))
    assert windows.spread(4)[:, 0].tolist() == [0, 250, 500, 750]


# --- model ------------------------------------------------------------------------------------------------------------


def test_a_model_is_a_preset_a_file_or_a_type(tmp_path: Path) -> None:
    with torch.device("meta"):
        preset = build_model(model_config("nano", vocab=300, seq=32))
        file = tmp_path / "config.json"
        file.write_text(
            json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 50257})
        )
        from_file = build_model(model_config(str(file), vocab=300, seq=32))
        by_type = build_model(model_config("gpt2", vocab=300, seq=32))
    assert len(blocks_of(preset)) == PRESETS["nano"][1]
    assert len(blocks_of(from_file)) == 3
    assert len(blocks_of(by_type)) == 12
    assert {model.get_input_embeddings().weight.shape[0] for model in (preset, from_file, by_type)} == {300}


def test_a_run_has_what_builds_its_model(tmp_path: Path) -> None:
    """With the vocabulary that the tokenizer really has, and weights in fp32 whatever the configuration says."""
    write(tmp_path / "text", documents(60))
    corpus = prepare_corpus([str(tmp_path / "text")], vocab=2048, cache=tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "dtype": "bfloat16"}))
    settings = Settings(out=str(tmp_path / "run"), model=str(file))
    save_model(settings, corpus)
    config = AutoConfig.from_pretrained(tmp_path / "run/model")
    assert (config.vocab_size, config.dtype) == (corpus.vocab, torch.float32)
    assert corpus.vocab < 2048
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert (len(tokenizer), tokenizer.eos_token_id) == (corpus.vocab, config.eos_token_id)
    assert (tmp_path / "run/model").stat().st_mode == (tmp_path / "run").stat().st_mode, "others may read it too"
    (Path(corpus.directory) / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"tokenizer.json: found nothing there; needed .* Remove its folder"):
        save_model(settings, corpus)


# --- summary ----------------------------------------------------------------------------------------------------------


def summary(name: str, losses: list[float]) -> TrainingSummary:
    points = tuple(Point(step=10 * i, seconds=5.0 * i, loss=loss) for i, loss in enumerate(losses))
    return TrainingSummary(
        name=name,
        train=points[1:],
        validation=points,
        tokens=1000,
        step_seconds=0.5,
        tokens_per_second=100.0,
        forward_backward=0.8,
        optimizer=0.1,
    )


def test_the_crossing_is_read_between_two_validations() -> None:
    curve = summary("muon", [8.0, 4.0, 3.0, 2.5]).validation
    assert crossing_of(curve, 3.25) == (17.5, 8.75)
    assert crossing_of(curve, 4.0) == (10.0, 5.0)
    assert crossing_of(curve, 9.0) == (0.0, 0.0)
    assert crossing_of(curve, 2.4) is None


def test_the_better_optimizer_is_compared_with_the_other_whichever_it_is() -> None:
    good, poor = [8.0, 4.0, 3.0, 2.5], [8.0, 5.0, 4.0, 3.5]
    comparison = compare([summary("muon", good), summary("adamw", poor)])
    assert comparison is not None
    assert (comparison.faster, comparison.slower, comparison.steps, comparison.of_steps) == ("muon", "adamw", 15.0, 30)
    assert "Muon reached AdamW's final validation loss of 3.500 after 15 of 30 steps (0.50×)" in str(comparison)
    comparison = compare([summary("muon", poor), summary("adamw", good)])
    assert comparison is not None
    assert (comparison.faster, comparison.steps) == ("adamw", 15.0)
    assert compare([summary("muon", good)]) is None
    assert compare([summary("muon", good), summary("adamw", poor[:-1])]) is None


def test_metrics_forget_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    others = dict.fromkeys(("tokens", "seconds", *TIMES), 1)
    for run in ("muon", "adamw"):
        for step in (1, 2, 3):
            append_metrics(tmp_path, run=run, step=step, loss=1 / 3, **others)
    cut_metrics(tmp_path, "adamw", 1)
    append_metrics(tmp_path, run="adamw", step=2, loss=0.1, **others)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"run": "adamw", "st')  # killed in the middle of a line
    records = [(r["run"], r["step"], r["loss"]) for r in read_metrics(tmp_path)]
    assert records == [
        ("muon", 1, 1 / 3),
        ("muon", 2, 1 / 3),
        ("muon", 3, 1 / 3),
        ("adamw", 1, 1 / 3),
        ("adamw", 2, 0.1),
    ]


def test_a_stopped_run_names_the_step_from_which_it_continues(tmp_path: Path) -> None:
    settings, write = (
        Settings(out=str(tmp_path), optimizer="both", steps=20, warmup=0),
        f"muonmesh train --resume {tmp_path}",
    )
    none = f"from the start, since it has no checkpoint: {write}"
    assert continuation(tmp_path, settings) == f"Continue muon {none}"
    for name, step, expected in (
        ("muon", 10, f"Continue muon from step 10: {write}"),
        ("muon", 20, f"Continue adamw {none}"),
        ("adamw", 15, f"Continue adamw from step 15: {write}"),
    ):
        folders.write(checkpoints_of(tmp_path, name) / f"step-{step:08d}", {"weight": torch.ones(2)}, {})
        assert continuation(tmp_path, settings) == expected


# --- options ----------------------------------------------------------------------------------------------------------

WRONG = {
    "--lr 0": r"--lr 0.0: needed a positive, finite",
    "--lr 1e300": r"--lr 1e\+300: needed a number of at most 2147483647",
    "--adamw-lr nan": r"--adamw-lr nan: needed a positive, finite",
    "--steps 0": r"--steps 0: needed a whole number of at least 1",
    "--warmup 12 --steps 12": r"--warmup 12: leaves none of the 12 steps. Write: --warmup 1",
    "--clip -1": r"--clip -1.0: needed zero or more",
    "--ranks 0": r"--ranks 0: needed a whole number of at least 1",
    "--ranks 100000": r"--ranks 100000: needed at most 1024, since each is a process of this machine. Write: --ranks 2",
    "--batch 3": r"--batch 3: cannot be divided over 2 ranks × 1 micro-steps; .* Write: --batch 4",
    "--batch 4 --grad-accum 3": r"Write: --batch 6",
    "--model nonsense": r"--model nonsense: .*Needed a preset \(nano",
    "--model missing.json": r"--model missing.json: found nothing there; needed a transformers config.json",
    "--model vit": r"--model: vit does not predict the next token",
    "--model gpt2 --seq 2000": r"--model gpt2: reads at most 1024 tokens; --seq is 2000. Write: --seq 1024",
    "--data nothing/here": r"--data 'nothing/here': found no file",
    "--vocab 12": r"--vocab 12: needed a whole number of at least 257",
    "--optimizer sgd": r"(?s)--optimizer.*sgd.*muon.*adamw.*both",
    "--parallel zero": r"(?s)--parallel.*zero.*ddp.*fsdp.*hsdp",
    "--parallel hsdp --ranks 3": r"--ranks 3: --parallel hsdp needs a number of ranks that 2 divides. Write: --ranks 4",
    "--schedule never": r"(?s)--schedule.*never.*cosine",
    "--resume nowhere": r"nowhere: found no config.json; needed the directory of a run",
    "--resume auto": r"--resume auto: found no --out; needed the directory",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_values_fail_before_any_rank_starts(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    device = [] if "--resume" in line else ["--device", "cpu", "--out", "run"]
    result = CliRunner().invoke(app, ["train", *line.split(), *device], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert re.search(WRONG[line], result.stderr), result.stderr
    assert not (tmp_path / "run").exists()


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "too little"})
    options = ["--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 2
    assert re.search(r"found \d+ tokens to learn from; needed more than 128", result.stderr)


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "run", {"thesis.txt": "the only copy"})
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert result.exit_code == 2
    assert f"--resume {tmp_path / 'run'}" in result.stderr


def test_a_start_that_was_killed_leaves_a_directory_for_the_next(tmp_path: Path) -> None:
    """The rest of config.json counted as a file of a run, so --out wanted --resume, and --resume wanted a run."""
    write(tmp_path / "run", {LOCK_FILE: "", ".config.json.writing": '{"model": "na'})
    check_new(tmp_path / "run")
    write(tmp_path / "run", {"config.json": "{}"})
    with pytest.raises(FileError, match="already there"):
        check_new(tmp_path / "run")


def test_help_is_grouped_and_needs_no_model_library() -> None:
    code = (
        "import sys; sys.argv = ['muonmesh', 'train', '--help']\n"
        "from muonmesh.tools.cli import main\n"
        "try: main()\n"
        "finally: print('loaded:', sorted({'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for group in ("What to learn", "How to learn", "Where to run", "What to keep"):
        assert group in result.stdout
    assert "loaded: []" in result.stdout


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from muonmesh.tools.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "needs typer" in result.stderr
    assert "pip install 'muonmesh[train]'" in result.stderr


# --- ranks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1: ValueError: the third layer is on fire"),
        pytest.param("kill", "rank 1: ended by SIGKILL", marks=pytest.mark.soak),
    ],
)
def test_an_error_on_one_rank_ends_the_run_with_its_message(
    how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "WORKER", "tests.support.failing_worker")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError('a file in the current folder replaced a module')")
    (tmp_path / "how").write_text(how)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    start = time.monotonic()
    try:
        with pytest.raises(RankFailed, match=re.escape(message)):
            launch(tmp_path, ranks=2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert time.monotonic() - start < 60
    assert dict(os.environ) == environment, "a torchrun that this process starts has another launcher"


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty files of the standard library: enough to learn from, little to prepare."""
    return copy_texts(tmp_path_factory.mktemp("text"), 60)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def stop_after(run: Path, optimizer: str, step: int, *options: object, rank: int | None = None, **streams: Any) -> int:
    """Start a run, press Ctrl-C once ``optimizer`` has finished ``step``, and return the exit code.

    With ``rank``, only that rank hears of it; ``streams`` are of `subprocess.Popen`.
    """
    process = subprocess.Popen([*COMMAND, *map(str, options)], **{"stdout": subprocess.DEVNULL, **streams})
    deadline = time.monotonic() + 240
    while not any(r["run"] == optimizer and r["step"] >= step and "loss" in r for r in read_metrics(run)):
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid if rank is None else process_of_rank(process.pid, rank), signal.SIGINT)
    return process.wait(timeout=120)


def process_of_rank(launcher: int, rank: int) -> int:
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among the children of {launcher}")


@pytest.fixture(scope="module")
def finished(runs: Path, text: Path) -> Path:
    """A run of both optimizers, with a Ctrl-C in its last validation: it has nothing to go on with, and is whole."""
    run = runs / "finished"
    temporary = runs / "temporary"
    temporary.mkdir()
    options, streams = (*TINY, "--data", text, "--out", run), [runs / name for name in ("output.txt", "errors.txt")]
    with streams[0].open("w") as output, streams[1].open("w") as errors:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        code = stop_after(run, "adamw", STEPS, *options, stdout=output, stderr=errors, env=environment)
    assert code == 0, streams[1].read_text()
    result = streams[0].read_text()
    files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # by importing it
    assert files == [], "torch's launcher makes a directory for logs"
    tokens = json.loads((run / "corpus.json").read_text())
    sentence = f"{tokens['train_tokens']:,} tokens to learn from, {tokens['validation_tokens']:,} held out"
    assert sentence in result
    (run / "output.txt").write_text(result)
    return run


@pytest.fixture(scope="module")
def stopped(runs: Path, text: Path) -> Path:
    """The same run, but for a Ctrl-C in its first half that only one of its ranks heard of."""
    run = runs / "stopped"
    options = [*TINY, "--data", text, "--out", run]
    assert stop_after(run, "muon", 3, *options, rank=1) == 130, "the other rank stops with it"
    stopped_at = latest_step(run / "checkpoints" / "muon")
    assert stopped_at is not None
    assert 3 <= stopped_at <= STEPS
    assert (run / "report.html").is_file(), "a stopped run is reported as far as it got"
    return run


@pytest.mark.slow
def test_a_run_learns_from_the_same_start_with_both_optimizers(finished: Path) -> None:
    losses = losses_of(finished)
    for name in ("muon", "adamw"):
        assert [step for run, step, key in losses if (run, key) == (name, "loss")] == list(range(1, STEPS + 1))
        assert [step for run, step, key in losses if (run, key) == (name, "validation_loss")] == [0, 4, 8, 12]
        assert losses[name, 0, "validation_loss"] == pytest.approx(math.log(400), rel=0.05)
        assert losses[name, STEPS, "validation_loss"] < losses[name, 0, "validation_loss"] - 0.1
    assert losses["muon", 0, "validation_loss"] == losses["adamw", 0, "validation_loss"], "other weights or other text"
    assert losses["muon", 1, "loss"] == losses["adamw", 1, "loss"], "other weights or other batches"
    assert losses["muon", 2, "loss"] != losses["adamw", 2, "loss"], "the same optimizer twice"


@pytest.mark.slow
def test_a_run_that_is_stopped_after_its_last_step_is_whole(finished: Path) -> None:
    """It says nothing of stopping, and leaves its last checkpoints and its report."""
    for name in ("muon", "adamw"):
        assert latest_step(finished / "checkpoints" / name) == STEPS
        assert losses_of(finished)[name, STEPS, "validation_loss"] > 0
    assert (finished / "report.html").is_file()
    assert "Stopped" not in (finished / "output.txt").read_text()


@pytest.mark.slow
def test_a_run_leaves_a_report_that_needs_nothing_else(finished: Path) -> None:
    run = finished
    output = (run / "output.txt").read_text()
    assert "Muon" in output
    assert "AdamW" in output
    assert f"Report: {run / 'report.html'}" in output

    page = (run / "report.html").read_text()
    assert re.findall(r"""[\s"'](?:src|href|srcset|data)\s*=""", page) == []
    assert '<meta name="viewport" content="width=device-width' in page
    assert "color-scheme: light dark" in page
    assert page.count("<svg") == page.count("</svg>") == 2
    assert page.count("currentColor") > 20
    assert "#010203" not in page
    title = "Muon and AdamW on nano"
    assert page.count(title) == 2
    corpus = load_corpus_of(run)
    for words in (
        f"{corpus.source}, {corpus.files} files, {corpus.train_tokens:,} tokens to learn from",
        "FSDP, ranks: 2, on cpu",
        "0, of weights, data order and dropout",
        f"torch {torch.__version__}",
        "validation loss, last",
        "perplexity of the held-out text",
        "share of the optimizer",
        "RMS of weight",
        "adamw.<wbr>embeddings",
    ):
        assert words in page, words
    for name in ("muon", "adamw"):
        sample = (run / f"sample-{name}.txt").read_text()
        assert len(sample) > 64
        assert html.escape(sample[:40]) in page
    assert ("final validation loss of" in page) == (compare(summarise(run)) is not None)

    settings = load_settings(run)
    assert (settings.ranks, settings.warmup, settings.batch, settings.dtype in ("bf16", "fp32")) == (2, 1, 8, True)
    environment = json.loads((run / "config.json").read_text())["environment"]
    assert {"command", "date", "torch", "machine"} <= set(environment)

    figures = json.loads((run / "report.json").read_text())
    losses = {training["name"]: training["validation"][-1]["loss"] for training in figures["trainings"]}
    assert losses == {summary.name: summary.final_validation_loss for summary in summarise(run)}

    assert "model.layers.1.mlp.down_proj.weight" in (run / "explain-muon.txt").read_text()
    assert "torch.optim.AdamW" in (run / "explain-adamw.txt").read_text()


@pytest.mark.slow
def test_the_page_lists_the_fields_of_metrics_and_the_files_of_a_run(finished: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()

    def first_column(title: str) -> set[str]:
        rows = page.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
        return {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}

    assert first_column("field of `metrics.jsonl`") == {key for record in read_metrics(finished) for key in record}
    assert first_column("file in `runs/NAME/`") == {path.name for path in finished.iterdir()} - {".lock", "output.txt"}


@pytest.mark.slow
def test_the_page_builds_the_trained_model(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss on the held-out text is the one that the run measured, but for its bf16."""
    shutil.copytree(finished, tmp_path / "runs/night")
    step = checkpoints_of(tmp_path / "runs/night", "muon") / f"step-{STEPS:08d}"
    step.rename(step.with_name("step-00000600"))
    monkeypatch.chdir(tmp_path)
    (names,) = run_page("docs/training.md", {})
    model, corpus = names["model"], load_corpus_of(finished)
    encode, held_out = names["tokenizer"].encode, corpus.validation()
    assert names["tokens"].shape[1] > len(encode("def "))
    assert encode(names["tokenizer"].decode(held_out[:500]))[:400] == held_out[:400].tolist()
    windows = torch.from_numpy(Windows(held_out, length=32, seed=0).spread(400))
    with torch.no_grad():
        loss = cross_entropy(model(input_ids=windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert float(loss) == pytest.approx(losses_of(finished)["muon", STEPS, "validation_loss"], abs=0.01)
    assert model.dtype == torch.float32


@pytest.mark.slow
def test_the_parts_of_a_step_are_measured(finished: Path) -> None:
    for record in read_metrics(finished):
        if "loss" in record:
            parts = [record[f"{part}_seconds"] for part in ("forward_backward", "optimizer")]
            assert min(parts) > 0
            assert sum(parts) <= record["step_seconds"]


@pytest.mark.slow
def test_the_momentum_of_a_run_is_in_its_checkpoint(finished: Path) -> None:
    checkpoint = checkpoints_of(finished, "muon") / f"step-{STEPS:08d}"
    by_name = momenta(checkpoint)
    assert by_name["model.layers.0.mlp.down_proj.weight"].shape == (64, 192), "whole, not a shard"
    assert len(by_name) == 7 * PRESETS["nano"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_checkpoint_has_the_learning_rate_of_its_step(name: Any, finished: Path) -> None:
    saved = json.loads((checkpoints_of(finished, name) / f"step-{STEPS:08d}" / "settings.json").read_text())
    (last,) = (r["lr"] for r in read_metrics(finished) if (r["run"], r["step"]) == (name, STEPS) and "lr" in r)
    assert {group["settings"]["lr"] for group in saved["groups"]} == {last}


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_stopped_in_either_half_resumes_bit_for_bit(finished: Path, stopped: Path, runs: Path) -> None:
    run = shutil.copytree(stopped, runs / "resumed")
    assert stop_after(run, "adamw", 2, "--resume", run) == 130
    assert latest_step(run / "checkpoints" / "muon") == STEPS
    assert train_command("--resume", run).returncode == 0
    assert losses_of(run) == losses_of(finished)


@pytest.mark.slow
@pytest.mark.soak
def test_a_checkpoint_has_no_world_size_and_what_follows_it_is_written_again(
    finished: Path, stopped: Path, runs: Path
) -> None:
    run = shutil.copytree(stopped, runs / "other-layout")
    # As if it had crashed at its very end, and this were the last checkpoint it had written.
    shutil.copy(finished / "metrics.jsonl", run / "metrics.jsonl")
    result = train_command("--resume", run, "--ranks", 1, "--parallel", "ddp")
    assert result.returncode == 0, result.stderr
    losses, expected = losses_of(run), losses_of(finished)
    assert losses.keys() == expected.keys()
    assert 0 < max(abs(losses[key] - expected[key]) for key in expected) < 0.02, "bf16 sums in another order, no more"
    assert len(read_metrics(run)) == len(read_metrics(finished)), "lines written twice"


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_without_checkpoints_says_that_it_begins_again(finished: Path, stopped: Path, runs: Path) -> None:
    run = shutil.copytree(stopped, runs / "without-checkpoints")
    shutil.rmtree(run / "checkpoints")
    result = train_command("--resume", run)
    assert result.returncode == 0, result.stderr
    sentence = "but muon has no checkpoint. A resume trains it again from step 0 and replaces its metrics"
    assert sentence in result.stderr
    assert losses_of(run) == losses_of(finished)


@pytest.mark.slow
@pytest.mark.soak
def test_resume_auto_leaves_a_finished_run_as_it_is(finished: Path, text: Path) -> None:
    before = (finished / "metrics.jsonl").read_text()
    options = (*TINY, "--data", text, "--out", finished)
    assert train_command(*options, "--resume", "auto").returncode == 0
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_run_that_ended_before_its_text_was_described_goes_on(tmp_path: Path) -> None:
    """On a full disk it may have its settings only; a resume then wanted the description, and --out another folder."""
    run, text = tmp_path / "run", write(tmp_path / "text", documents(60))
    run.mkdir()
    small: dict[str, Any] = {"model": "nano", "vocab": 300, "seq": 16, "batch": 1, "ranks": 1, "eval_sequences": 1}
    settings = Settings(out=str(run), data=(str(text),), optimizer="muon", steps=1, warmup=0, **small)
    settings.save({"digest": settings.digest})
    result = train_command("--resume", run)
    assert result.returncode == 0, result.stderr
    assert (run / "report.html").is_file()
    (run / "corpus.json").unlink()
    result = train_command("--resume", run)
    assert result.returncode == 2, "once it has learnt from a text, it must be shown to be the same"
    assert "corpus.json: found nothing there" in result.stderr


def test_resume_insists_on_the_same_settings(tmp_path: Path) -> None:
    Settings(out=str(tmp_path), lr=0.003).save({})
    options = {"ranks": 4, "lr": 0.003, "out": tmp_path, "device": "auto"}
    expected = Settings(out=str(tmp_path), ranks=4, lr=0.003)
    assert settings_from_options(options, str(tmp_path), set(options)) == (expected, True)
    for option, message in (
        ("--steps 7", "found --steps 7, and 600 in that run; needed the same"),
        ("--out other", "found --out other; needed the directory of that run"),
    ):
        result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), *option.split()], env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert message in result.stderr
