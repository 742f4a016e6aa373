"""Kills: a real `muonmesh train` whose ranks and launcher are killed at random moments, and what they leave behind.

As a program it prints what happened as JSON; its launchers and ranks are its own descendants, so that it can count::

    python -m tests.support.kills FOLDER '{"kills": 100}'

FOLDER holds ``text``, which is learned from; ``whole`` and ``killed`` are made there, the same run undisturbed and
disturbed. Most launchers and ranks are copies of one process that has imported torch: what they call is what the
command calls, but they start in a fifth of a second. Every tenth start is the command itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.models.llama import modeling_llama

from muonmesh.tools.cli import launch as launching
from muonmesh.tools.cli import training, worker
from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step
from muonmesh.tools.cli.launch import RankFailed, launch
from muonmesh.tools.cli.report import read_metrics
from muonmesh.tools.cli.run_files import locked
from muonmesh.tools.cli.run_settings import CONFIG_FILE, load_config, load_settings
from tests.support.runs import COMMAND, losses_of

IMPORTED = (training, modeling_llama)  # by this process, once for all its copies
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SECONDS_TO_END = 60.0  # for all processes of a run, once one was killed
LISTENS = "0A"  # a state in /proc/net/tcp


def options(run: Path, text: Path, *, steps: int, ranks: int) -> list[str]:
    """A command line whose run saves at every step."""
    values: tuple[object, ...] = ("--data", text, "--out", run, "--steps", steps, "--ranks", ranks)
    values += ("--model", "nano", "--vocab", 300, "--seq", 32, "--batch", 4, "--device", "cpu", "--dtype", "fp32")
    values += ("--optimizer", "muon", "--eval-every", 40, "--eval-sequences", 4, "--checkpoint-every", 1)
    return [str(value) for value in values]


def begun_like(whole: Path, run: Path) -> None:
    """A run with the settings and the text of another, and no step made."""
    run.mkdir()
    load_settings(whole, out=str(run)).save(load_config(whole)["environment"])
    shutil.copy(whole / "corpus.json", run)


def files(folder: Path) -> set[str]:
    """What is in a folder, by name."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- processes, as the system tells of them -----------------------------------------------------------------------


def adopt() -> None:
    """Become the parent of every descendant whose parent ends, as init would."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that are there, zombies among them."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def family(pid: int) -> list[int]:
    """All descendants of `pid`."""
    members = children(pid)
    return members + [other for child in members for other in family(child)]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listening() -> set[str]:
    """The sockets that listen for TCP on this machine, by inode."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            ports |= {row[9] for row in rows if row[3] == LISTENS}
    return ports


def ports_of(pids: list[int]) -> set[str]:
    """Those of these processes, by inode."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{link}").removeprefix("socket:[").removesuffix("]"))
    return sockets & listening()


def is_locked(run: Path) -> bool:
    """Whether a process that is still there holds the run's directory."""
    try:
        with locked(run, option="--resume"):
            return False
    except ValueError:
        return True


# --- one start ----------------------------------------------------------------------------------------------------


def rank(run: str) -> None:
    """What each rank is: the worker, in a copy of this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the launcher's are copied too, and a program would begin without
    sys.argv[1:] = [run]
    worker.main()


def copies(config: LaunchConfig, _: str) -> Callable[..., Any]:
    """Torch's launcher of copies of this process, in place of that of programs."""
    launcher = elastic_launch(replace(config, start_method="fork"), rank)
    return lambda *arguments: launcher(arguments[-1])


def start_copy(run: Path, *, ranks: int) -> int:
    """Start a launcher that is a copy of this process; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        with locked(run, option="--resume"):
            load_settings(run, ranks=ranks).save(load_config(run)["environment"])
            launching.elastic_launch = copies  # here alone, in a copy of the process
            launch(run, ranks=ranks)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except RankFailed as error:
        print(f"FAILED {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def start_command(*arguments: str) -> int:
    """Start the command; its process id."""
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL).pid


def ended(pid: int) -> int | None:
    """The exit code of a child that has ended (negative: its signal), or None."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def reap(seconds: float) -> list[int]:
    """Wait until no process that this one has started or adopted is there; those that stay."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if not reaped:
            time.sleep(0.02)
    return family(os.getpid())


def kill_at_a_random_moment(launcher: int, run: Path, chance: random.Random, step_seconds: float) -> str | None:
    """Kill a rank or the launcher: while they start, or within three steps; None where the run ended before that."""
    folder = checkpoints_of(run, "muon")
    if chance.random() < 0.1:
        when, moment = "before the first step", time.monotonic() + chance.uniform(0.0, 1.5)
    else:
        before = latest_step(folder)
        while latest_step(folder) == before:
            if ended(launcher) is not None:
                return None
            time.sleep(0.002)
        when, moment = "in a step", time.monotonic() + chance.uniform(0.0, 3.0) * step_seconds
    while time.monotonic() < moment:
        if ended(launcher) is not None:
            return None
        time.sleep(0.0005)
    ranks = children(launcher)
    who = chance.choice(("a rank", "a rank", "a rank", "the launcher", "the launcher's terminal"))
    if who == "a rank" and not ranks:
        who = "the launcher"
    saving = next(folder.glob(".*.writing"), None) is not None
    pid = chance.choice(ranks) if who == "a rank" else launcher
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGHUP if who == "the launcher's terminal" else signal.SIGKILL)
    return f"{who}, {'while saving' if saving else when}"


# --- the whole ----------------------------------------------------------------------------------------------------


def killed_run(
    folder: Path,
    *,
    steps: int = 400,
    kills: int = 100,
    seed: int = 0,
    ranks: Sequence[int] = (2,),
    commands: int = 10,
    seconds: float = 3000.0,
) -> dict[str, Any]:
    """Run it whole, then again with kills; what was killed, what was left, and how far losses are apart.

    Args:
        folder: Holds ``text``; two runs are made beside it.
        steps: Of each run.
        kills: How many, before the run may come to its end.
        seed: Decides the moments and whom they meet.
        ranks: How many each start has, one after the other and again.
        commands: Every how many starts the command itself is started.
        seconds: After which no other kill is begun, so that the counts of a slow machine are fewer, not lost.
    """
    chance = random.Random(seed)
    whole, run, text = folder / "whole", folder / "killed", folder / "text"
    temporary = (folder / "tmp").resolve()
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    subprocess.run([*COMMAND, *options(whole, text, steps=steps, ranks=ranks[0])], check=True, stdout=-3)
    own_files = files(temporary)  # of a run that nobody disturbs
    per_step = sorted(record["step_seconds"] for record in read_metrics(whole) if "step_seconds" in record)
    step_seconds = 3.0 * per_step[len(per_step) // 2]  # and its checkpoint
    counted: Counter[str] = Counter()
    leftovers: Counter[str] = Counter(processes=0, zombies=0, ports=0)
    starts, slowest, refused = 0, 0.0, 0
    until = time.monotonic() + seconds
    while sum(counted.values()) < kills and time.monotonic() < until:
        began = (run / CONFIG_FILE).is_file() and latest_step(checkpoints_of(run, "muon")) is not None
        if began and (latest_step(checkpoints_of(run, "muon")) or 0) > steps - 5:
            break
        many = ranks[starts % len(ranks)]
        if not (run / CONFIG_FILE).is_file():
            launcher = start_command(*options(run, text, steps=steps, ranks=many), "--resume", "auto")
        elif starts % commands == 0:
            launcher = start_command("--resume", str(run), "--ranks", str(many))
        else:
            launcher = start_copy(run, ranks=many)
        starts += 1
        victim = kill_at_a_random_moment(launcher, run, chance, step_seconds)
        if victim is None:
            refused += 1
            reap(SECONDS_TO_END)
            continue
        open_ports = ports_of([launcher, *children(launcher)])
        at = time.monotonic()
        stay = reap(SECONDS_TO_END)
        slowest = max(slowest, time.monotonic() - at)
        counted[victim] += 1
        leftovers["zombies"] += sum(map(is_zombie, stay))
        leftovers["processes"] += len(stay)
        leftovers["ports"] += len(open_ports & listening())
        for pid in stay:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    last_run = subprocess.run([*COMMAND, "--resume", str(run), "--ranks", str(ranks[0])], check=False, stdout=-3)
    expected, resumed = losses_of(whole), losses_of(run)
    assert expected.keys() == resumed.keys(), sorted(expected.keys() ^ resumed.keys())
    return {
        "kills": sum(counted.values()),
        "starts": starts,
        "ended_by_itself": refused,
        "exit": last_run.returncode,
        "killed": dict(sorted(counted.items())),
        "slowest_end": round(slowest, 2),
        "left": {
            **leftovers,
            "locks": int(is_locked(run)),
            "files": sorted(files(run) ^ files(whole)),
            "temporary": sorted(files(temporary) - own_files),
        },
        "losses": len(expected),
        "apart": max(abs(resumed[name] - expected[name]) for name in expected),
        "steps": steps,
    }


if __name__ == "__main__":
    adopt()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a launcher would rightly ignore it
    print(json.dumps(killed_run(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
