"""`muonmesh train` when things go wrong around it: what ends it, what is left, and the one sentence that says so."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muonmesh.checkpoint.manifest import MANIFEST_FILE
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step
from muonmesh.tools.cli.corpus import prepare_corpus
from muonmesh.tools.cli.report import read_metrics
from tests.support.disks import read_only_for_new_files, small_disk
from tests.support.kills import children, is_zombie
from tests.support.runs import COMMAND, train_command, wait_for

RANKS = 2
VOCAB = 300


def options(run: Path, text: Path, *more: object) -> list[str]:
    common = ("--data", text, "--model", "nano", "--vocab", VOCAB, "--seq", 32, "--batch", 4, "--device", "cpu")
    common += ("--optimizer", "muon", "--eval-sequences", 4, "--ranks", RANKS, "--out", run)
    return [*map(str, (*common, *more))]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and not is_zombie(pid)


LONG = ("--steps", 1_000_000, "--eval-every", 1_000_000)  # would take hours


@pytest.fixture
def long_run(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, subprocess.Popen[str], list[int]]]:
    """A run that would take hours, with its launcher and its ranks, once it has made three steps."""
    run = folder / request.node.name
    process = subprocess.Popen(
        [*COMMAND, *options(run, folder / "text", *LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or any(r["step"] >= 3 for r in read_metrics(run)))
        assert process.poll() is None, process.communicate()
        ranks = children(process.pid)
        assert len(ranks) == RANKS
        yield run, process, ranks
    finally:
        process.kill()
        process.communicate()


LongRun = tuple[Path, subprocess.Popen[str], list[int]]


def begin_in_terminal() -> None:
    """In the new process: the terminal is its own, and its closing is heard, even where these tests run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.soak
def test_a_closed_terminal_stops_a_run_with_a_checkpoint(folder: Path) -> None:
    """A real one: its line is drawn until it is gone, and then nothing can be written to it."""
    run = folder / "closed"
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *options(run, folder / "text", *LONG)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=begin_in_terminal,
    )
    os.close(inside)
    printed = b""
    try:
        while not any(record["step"] >= 3 for record in read_metrics(run)):
            assert process.poll() is None, printed.decode()
            if select.select([terminal], [], [], 0.1)[0]:
                printed += os.read(terminal, 4096)
        ranks = children(process.pid)
        assert len(ranks) == RANKS
        os.close(terminal)
        os.kill(process.pid, signal.SIGHUP)  # the system has said it, and a shell says it again
        assert process.wait(timeout=120) == 130
    finally:
        process.kill()
        process.wait()
    assert b"muon" in printed
    assert not any(map(alive, ranks))
    assert (latest_step(checkpoints_of(run, "muon")) or 0) >= 3
    assert (run / "report.html").is_file()
    assert not (run / "errors").exists()


@pytest.mark.slow
def test_a_run_is_locked_and_its_ranks_end_with_a_launcher_that_is_killed(long_run: LongRun, folder: Path) -> None:
    run, process, ranks = long_run
    for option in (["--out", str(run)], ["--resume", str(run)]):
        second = CliRunner().invoke(app, ["train", *option])
        assert second.exit_code == 2
        assert len(second.stderr.splitlines()) == 1
        assert str(run) in second.stderr
        if option[0] == "--resume":
            assert "another process is training there" in second.stderr
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, ranks)), seconds=10)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("killed", [True, False], ids=["killed rank", "second Ctrl-C"])
def test_a_run_that_ends_at_once_says_how_to_continue(killed: bool, long_run: LongRun) -> None:
    run, process, ranks = long_run
    if killed:
        os.kill(ranks[1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # the ranks have rarely written a checkpoint then
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    step = latest_step(checkpoints_of(run, "muon"))
    start = f"from step {step}" if step else "from the start, since it has no checkpoint"
    sentence = f"Continue muon {start}: muonmesh train --resume {shlex.quote(str(run))}\n"
    if killed:
        assert process.returncode == 1
        assert errors.endswith(f"rank 1: ended by SIGKILL (out of memory?). {sentence}")
    else:
        assert process.returncode == 130
        assert f"Stopped. {sentence}" in output
    assert not any(map(alive, ranks))


@pytest.mark.slow
@pytest.mark.soak
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(folder: Path) -> None:
    run = folder / "diverging"
    more = ("--steps", 40, "--warmup", 0, "--checkpoint-every", 1, "--lr", "2e9", "--clip", 0)
    result = train_command(*options(run, folder / "text"), *more, "--schedule", "constant")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert "lower --lr" in message
    assert "finite" in message
    assert all(float("-inf") < r.get("loss", 0.0) < float("inf") for r in read_metrics(run))
    assert not list(run.glob("checkpoints/*/*.writing"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.soak
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(disk: Path, folder: Path) -> None:
    # A checkpoint of nano takes 0.9 MB, so that one fits beside the text and two do not, once this lies there too.
    (disk / "ballast").write_bytes(bytes(1_700_000))
    run = disk / "run"
    result = train_command(*options(run, folder / "text"), "--steps", 6, "--checkpoint-every", 2)
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stderr
    assert "JSONDecodeError" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "could not be written: No space left on device" in result.stderr
    step = latest_step(checkpoints_of(run, "muon"))
    assert step is not None
    assert f"The checkpoint of step {step} is kept" in result.stderr
    assert (checkpoints_of(run, "muon") / f"step-{step:08d}" / MANIFEST_FILE).is_file()
    (disk / "ballast").unlink()
    result = train_command("--resume", run)
    assert result.returncode == 0, result.stderr
    assert latest_step(checkpoints_of(run, "muon")) == 6


@pytest.mark.slow
@pytest.mark.soak
def test_a_disk_that_becomes_read_only_is_one_sentence_on_every_rank(disk: Path, folder: Path) -> None:
    """Metrics are written by rank 0, whose error reached the others as gloo's traceback of a lost connection."""
    run = disk / "run"
    more = ("--steps", 10_000, "--eval-every", 10_000, "--checkpoint-every", 3)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *options(run, folder / "text", *more)], text=True, **pipes)
    try:
        wait_for(lambda: process.poll() is not None or any(r["step"] >= 4 for r in read_metrics(run)))
        with read_only_for_new_files(disk):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 1
            assert "Traceback" not in errors
            assert "gloo" not in errors
            *ranks, last = errors.strip().splitlines()
            needed = "could not be written: Read-only file system. Choose a place that can be written"
            assert all(needed in message for message in ranks), errors
            assert len(ranks) == RANKS
            assert last.endswith("its own output is above")
            assert latest_step(checkpoints_of(run, "muon")) in range(3, 10_000, 3)
            result = train_command("--resume", run)
            assert result.returncode == 2
            assert len(result.stderr.strip().splitlines()) == 1
            assert needed in result.stderr
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("size", [0, 60_000])
def test_a_disk_that_is_full_from_the_start_is_one_sentence(size: int, folder: Path, tmp_path: Path) -> None:
    """Whatever file is the first that does not fit: the text, the settings, the room for errors."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    result = train_command(*options(tmp_path / "run", folder / "text"), "--steps", 2, preexec_fn=limit)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    # Without room for a byte, importing torch may already fail: it looks for a temporary directory.
    assert "File too large" in result.stderr or (not size and "No usable temporary directory" in result.stderr)


@pytest.mark.slow
def test_what_is_no_file_is_never_waited_for_and_paths_are_tried_first(folder: Path, tmp_path: Path) -> None:
    text = shutil.copytree(folder / "text", tmp_path / "text")
    os.mkfifo(text / "pipe.txt")
    (text / "nowhere.txt").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(text / "socket.txt"))
        (tmp_path / "file").write_text("in the way")
        wrong = {
            ("--data", text / "pipe.txt"): "found a named pipe",
            ("--data", text / "nowhere.txt"): "found a link to nothing",
            ("--data", text / "socket.txt"): "found a socket",
            ("--data", "/dev/zero"): "found a device",
            ("--out", tmp_path / "file"): "already there",
            ("--out", tmp_path / "file" / "run"): "could not be written: Not a directory",
            ("--out", "/proc/run"): "could not be written",
        }
        for option, message in wrong.items():
            arguments = [*options(tmp_path / "run", text), *map(str, option)]
            result = CliRunner().invoke(app, ["train", *arguments])
            assert result.exit_code == 2, option
            assert message in result.stderr, (option, result.stderr)
            assert len(result.stderr.splitlines()) == 1
            assert not (tmp_path / "run").exists(), option
    first, second = (
        prepare_corpus([str(source)], vocab=VOCAB, cache=tmp_path / "cache") for source in (text, folder / "text")
    )
    assert first.source == str(text)
    assert dataclasses.replace(first, source=second.source) == second, "in a folder they are passed over"


@pytest.mark.slow
@pytest.mark.soak
def test_a_terminal_that_prints_ascii_gets_ascii(folder: Path) -> None:
    run = folder / "ascii ×"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = train_command(*options(run, folder / "text"), "--steps", 2, "--optimizer", "both", env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "validation loss" in result.stdout
    assert re.search(r"\d\.\d\d\? the training time", result.stdout), "× in other terminals"
    content = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert os.fsencode(content["out"]) == os.fsencode(run)
