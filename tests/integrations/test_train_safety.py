"""`muonmesh train` when things go wrong: what ends it, what is left, and that a sentence says so on every rank."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from muonmesh.cli.checkpoints import Checkpoints, checkpoints_of, latest_step
from muonmesh.cli.corpus import Corpus, load_corpus_of, prepare_corpus, save_corpus_of, standard_library
from muonmesh.cli.entries import flat
from muonmesh.cli.failure import RunError
from muonmesh.cli.manifest import MANIFEST_FILE
from muonmesh.cli.metrics import MetricsLog, read_metrics
from muonmesh.cli.settings import Parallel, Settings, load_settings
from muonmesh.cli.stop import StopRequest
from muonmesh.cli.together import on_first_rank, together
from muonmesh.cli.training import Training
from tests.workers import Pool

COMMAND = (sys.executable, "-c", "from muonmesh.cli import main; main()", "train")
RANKS = 2
VOCAB = 300


# --- every rank says what one has found -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safety")
    (folder / "text").mkdir()
    for file in sorted(standard_library(), key=lambda path: path.name)[:24:2]:
        shutil.copy(file, folder / "text" / f"{file.parent.name}-{file.name}")
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return prepare_corpus([str(folder / "text")], vocab=VOCAB, cache=folder / "cache")


@pytest.fixture(scope="module")
def prepare(folder: Path, corpus: Corpus) -> Callable[..., Path]:
    """`prepare(name, parallel=..., ...)` is the directory of a run that is ready for its ranks."""

    def run(name: str, **changes: Any) -> Path:
        values: dict[str, Any] = {
            "model": "nano",
            "data": (str(folder / "text"),),
            "optimizer": "muon",
            "ranks": RANKS,
            "steps": 4,
            "warmup": 0,
            "batch": 4,
            "seq": 32,
            "vocab": VOCAB,
            "dtype": "fp32",
            "eval_every": 2,
            "eval_sequences": 4,
            "checkpoint_every": 2,
        }
        settings = Settings(out=str(folder / name), **{**values, **changes})
        settings.directory.mkdir(exist_ok=True)
        settings.save({})
        save_corpus_of(settings.directory, corpus)
        return settings.directory

    return run


@pytest.fixture(scope="module")
def pool(workers: Callable[[int], Pool]) -> Pool:
    return workers(RANKS)


def training_of(run: Path) -> Training:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun sets it; DeepSpeed asks
    return Training("muon", load_settings(run), load_corpus_of(run), torch.device("cpu"))


def train(run: Path) -> None:
    training = training_of(run)
    log = MetricsLog(run) if dist.get_rank() == 0 else None
    try:
        training.run(log, StopRequest())
    finally:
        if log is not None:
            log.close()
        training.engine.close()


def restore(run: Path) -> tuple[str, bool]:
    """What this rank says when it goes to its checkpoint, and whether its weights are those it began with."""
    training = training_of(run)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    message = ""
    try:
        training.restore()
    except RunError as error:
        message = str(error)
    same = all(map(_equal, before, training.model.parameters()))
    training.engine.close()
    return message, same


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (one, other)]
    return torch.equal(*pair)


def scatter_bytes(place: Path) -> None:
    file = place / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    for number in range(64):
        content[(number + 1) * len(content) // 66] ^= 0x55
    file.write_bytes(bytes(content))


def without_manifest(place: Path) -> None:
    (place / MANIFEST_FILE).unlink()


def nan_in_a_file(place: Path) -> None:
    """As an older version would have saved it: without a manifest, and without looking."""
    without_manifest(place)
    file = place / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    metadata = pickle.loads((place / ".metadata").read_bytes())
    info = next(info for info in metadata.storage_data.values() if info.relative_path == file.name)
    piece = bytes(content[info.offset : info.offset + info.length])
    numbers = torch.load(io.BytesIO(piece), weights_only=True).numpy().tobytes()
    begin = info.offset + piece.index(numbers)
    content[begin : begin + 64] = torch.full((16,), float("nan")).numpy().tobytes()
    file.write_bytes(bytes(content))


def cut(place: Path) -> None:
    file = place / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def progress(content: str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        without_manifest(place)
        (place / "progress.json").write_text(content)

    return write


def rename(place: Path) -> None:
    place.rename(place.with_name("step-00000003"))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "64 bytes": (scatter_bytes, "__1_0.distcp: its content has changed since it was written"),
    "nan without manifest": (nan_in_a_file, "__1_0.distcp: found infinity or NaN in "),
    "cut": (cut, "__0_0.distcp: found"),
    "cut without manifest": (lambda place: (without_manifest(place), cut(place)), "__0_0.distcp: found"),
    "missing": (lambda place: (place / "__1_0.distcp").unlink(), "__1_0.distcp: not there"),
    "metadata": (lambda place: (place / ".metadata").write_bytes(b"garbage"), ".metadata: found 7 bytes"),
    "manifest": (lambda place: (place / MANIFEST_FILE).write_text("{"), f"{MANIFEST_FILE}: not JSON"),
    "no progress": (lambda place: (place / "progress.json").unlink(), "progress.json: not there"),
    "progress of text": (progress("seconds"), "progress.json: not JSON"),
    "progress without seconds": (progress("{}"), "progress.json: found no 'seconds'"),
    "progress with NaN": (progress('{"seconds": NaN}'), "progress.json: found seconds NaN"),
    "progress with true": (progress('{"seconds": true}'), "progress.json: found seconds true"),
    "another step": (rename, "progress.json: found step 4; needed 3"),
}


@pytest.fixture(scope="module")
def saved(pool: Pool, prepare: Callable[..., Path]) -> Callable[[Parallel], Path]:
    """`saved("fsdp")` is a run with a checkpoint of its last step."""
    made: dict[Parallel, Path] = {}

    def run(parallel: Parallel) -> Path:
        if parallel not in made:
            made[parallel] = prepare(f"saved-{parallel}", parallel=parallel)
            pool.run(train, made[parallel], timeout=120)
        return made[parallel]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "zero2"])
def test_a_damaged_checkpoint_is_one_sentence_on_every_rank_before_a_weight_changes(
    parallel: Parallel, saved: Callable[[Parallel], Path], pool: Pool, prepare: Callable[..., Path]
) -> None:
    original = saved(parallel)
    run = prepare(f"damaged-{parallel}", parallel=parallel)
    place = checkpoints_of(run, "muon") / "step-00000004"
    # The engine is the slow part; it restores through the same `Checkpoints`, so a few kinds show that it does.
    for name in DAMAGE if parallel == "fsdp" else ("64 bytes", "nan without manifest", "metadata"):
        how, expected = DAMAGE[name]
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        shutil.copytree(original / "checkpoints", run / "checkpoints")
        how(place)
        for message, same in pool.run(restore, run):
            assert expected in message, name
            assert str(run / "checkpoints" / "muon") in message, name
            assert "\n" not in message, name
            assert same, name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "zero2"])
def test_a_checkpoint_without_manifest_still_loads_and_one_that_acts_does_not(
    parallel: Parallel, saved: Callable[[Parallel], Path], pool: Pool, prepare: Callable[..., Path], folder: Path
) -> None:
    run = prepare(f"older-{parallel}", parallel=parallel)
    shutil.copytree(saved(parallel) / "checkpoints", run / "checkpoints")
    place = checkpoints_of(run, "muon") / "step-00000004"
    without_manifest(place)
    (place / "progress.json").write_text('{"seconds": 1.5}')  # as they were
    assert pool.run(restore, run) == [("", False)] * RANKS
    mark = folder / f"it acted {parallel}"
    (place / ".metadata").write_bytes(pickle.dumps(_Evil(mark)))
    for message, same in pool.run(restore, run):
        assert ".metadata: not what a training writes: it names posix.mkdir" in message
        assert same
    assert not mark.exists()


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def save_poisoned(directory: Path) -> list[str]:
    """Save a state, then one of which only rank 1 holds a NaN, then one that does not fit on the disk."""
    messages = []
    checkpoints = Checkpoints(directory)
    state = {"model": {"weight": torch.ones(64, 64)}}
    checkpoints.save(1, state, {"seconds": 1.0})
    poisoned = {"model": {"weight": torch.ones(64, 64)}}
    if dist.get_rank() == 1:
        poisoned["model"]["weight"][3, 3] = float("nan")
    for step, held in ((2, poisoned), (3, {"model": {"weight": torch.ones(4096, 512)}})):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            checkpoints.save(step, held, {"seconds": 1.0})
        except RunError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    back = {"model": {"weight": torch.zeros(64, 64)}}
    assert checkpoints.load(1, back) == {"step": 1, "seconds": 1.0}
    assert torch.equal(back["model"]["weight"], state["model"]["weight"])
    assert flat(back).keys() == {"model.weight"}
    return messages


def test_what_is_not_finite_or_does_not_fit_is_not_saved_and_the_last_checkpoint_stays(
    pool: Pool, tmp_path: Path
) -> None:
    for messages in pool.run(save_poisoned, tmp_path):
        assert len(messages) == 2
        assert "model.weight: not finite, so it is not saved. The checkpoint of step 1 is kept." in messages[0]
        assert f"could not be written: {os.strerror(errno.EFBIG)}" in messages[1]
        assert "The checkpoint of step 1 is kept." in messages[1]
        assert "\n" not in "".join(messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def fail_apart(first_only: bool) -> str:
    def work() -> None:
        if dist.get_rank() == (0 if first_only else 1):
            raise RunError("the disk is full")

    with pytest.raises(RunError) as caught:
        (on_first_rank if first_only else together)(work)
    return str(caught.value)


@pytest.mark.parametrize("first_only", [True, False])
def test_what_one_rank_cannot_do_all_ranks_raise(first_only: bool, pool: Pool) -> None:
    assert pool.run(fail_apart, first_only) == ["the disk is full"] * RANKS


# --- the command ------------------------------------------------------------------------------------------------------


def line(run: Path, text: Path, *options: object) -> list[str]:
    common = ("--data", text, "--model", "nano", "--vocab", VOCAB, "--seq", 32, "--batch", 4, "--device", "cpu")
    common += ("--optimizer", "muon", "--eval-sequences", 4, "--ranks", RANKS, "--out", run)
    return [*COMMAND, *map(str, (*common, *options))]


def command(run: Path, text: Path, *options: object, **changes: Any) -> subprocess.CompletedProcess[str]:
    values: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 300, **changes}
    return subprocess.run(line(run, text, *options), **values)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def long_run(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, subprocess.Popen[str], list[int]]]:
    """A run that would take hours, with its launcher and its ranks, once it has made three steps."""
    run = folder / request.node.name
    process = subprocess.Popen(
        line(run, folder / "text", "--steps", 1_000_000, "--eval-every", 1_000_000),
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


@pytest.mark.slow
def test_a_closed_terminal_stops_a_run_with_a_checkpoint(long_run: LongRun) -> None:
    run, process, ranks = long_run
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGHUP)  # the system and the shell may both say it
    assert process.wait(timeout=120) == 130
    assert not any(map(alive, ranks))
    assert (latest_step(checkpoints_of(run, "muon")) or 0) >= 3
    assert (run / "report.html").is_file()
    assert not (run / "errors").exists()


@pytest.mark.slow
def test_a_run_is_locked_and_its_ranks_end_with_a_launcher_that_is_killed(long_run: LongRun, folder: Path) -> None:
    run, process, ranks = long_run
    for option in (["--out", str(run)], ["--resume", str(run)]):
        second = subprocess.run([*COMMAND, *option], capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 2
        assert len(second.stderr.splitlines()) == 1
        assert str(run) in second.stderr
        if option[0] == "--resume":
            assert f"process {process.pid} is training there" in second.stderr
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, ranks)), seconds=10)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(folder: Path) -> None:
    run = folder / "diverging"
    options = ("--steps", 40, "--warmup", 0, "--checkpoint-every", 1, "--lr", "1e30", "--clip", 0)
    result = command(run, folder / "text", *options, "--schedule", "constant")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert "lower --lr" in message
    assert "finite" in message
    assert all(float("-inf") < r.get("loss", 0.0) < float("inf") for r in read_metrics(run))
    assert not list(run.glob("checkpoints/*/*.writing"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(small_disk: Path, folder: Path) -> None:
    # A checkpoint of nano takes 0.9 MB, so that one fits beside the text and two do not, once this lies there too.
    (small_disk / "ballast").write_bytes(bytes(1_700_000))
    run = small_disk / "run"
    result = command(run, folder / "text", "--steps", 6, "--checkpoint-every", 2)
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stderr
    assert "JSONDecodeError" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "could not be written: No space left on device" in result.stderr
    kept = latest_step(checkpoints_of(run, "muon"))
    assert kept is not None
    assert f"The checkpoint of step {kept} is kept." in result.stderr
    assert (checkpoints_of(run, "muon") / f"step-{kept:08d}" / MANIFEST_FILE).is_file()
    (small_disk / "ballast").unlink()
    result = subprocess.run([*COMMAND, "--resume", str(run)], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert latest_step(checkpoints_of(run, "muon")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 60_000, 200_000])
def test_a_disk_that_is_full_from_the_start_is_one_sentence(size: int, folder: Path, tmp_path: Path) -> None:
    """Whatever file is the first that does not fit: the text, the settings, the room for errors."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    result = command(tmp_path / "run", folder / "text", "--steps", 2, preexec_fn=limit)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr, result.stderr
    assert "could not be written" in result.stderr or "cannot be written" in result.stderr


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
            ("--save-momentum", tmp_path): "found a folder there",
            ("--save-momentum", tmp_path / "file" / "m.safetensors"): "cannot be written: Not a directory",
            ("--save-momentum", "/proc/m.safetensors"): "cannot be written",
            ("--out", tmp_path / "file"): "already there",
            ("--out", tmp_path / "file" / "run"): "cannot be written: Not a directory",
            ("--out", "/proc/run"): "cannot be written",
        }
        from typer.testing import CliRunner

        from muonmesh.cli.app import app

        for option, message in wrong.items():
            arguments = [*line(tmp_path / "run", text)[len(COMMAND) :], *map(str, option)]
            result = CliRunner().invoke(app, ["train", *arguments])
            assert result.exit_code == 2, option
            assert message in result.stderr, (option, result.stderr)
            assert len(result.stderr.splitlines()) == 1
            assert not (tmp_path / "run").exists(), option
    assert prepare_corpus([str(text)], vocab=VOCAB, cache=tmp_path / "cache").files == len(list(text.glob("*.py")))


@pytest.mark.slow
def test_a_terminal_that_prints_ascii_gets_ascii(folder: Path) -> None:
    run = folder / "ascii ×"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = command(run, folder / "text", "--steps", 2, "--optimizer", "both", env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "validation loss" in result.stdout
    assert "ascii x" in result.stdout
    content = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert content["out"] == str(run)
