"""`make test-gpu`: tests and figures that need CUDA, most valuable first, or plain words that nothing was tested.

python -m tests.gpu.run [--minutes 10] [options of benchmarks/gpu.py, such as --peer dion=PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import torch

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
LEAST = 15.0
"""Seconds below which a part is not begun."""


class Part(NamedTuple):
    """A command, and for how many seconds it may run."""

    name: str
    seconds: float
    command: Sequence[str]


def tests(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-rf", "--color=no", *arguments]


def figures(*parts: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.first", *parts]


def parts(file: Path, options: Sequence[str]) -> list[Part]:
    """All there is to run, most valuable first; the figures of steps go to ``file``."""
    benchmark = [sys.executable, "-m", "benchmarks.gpu", "--json", str(file), *options]
    return [
        Part("ranks of NCCL on one GPU", 240, tests("tests/gpu/test_nccl.py")),
        Part("what the device can do", 45, figures("ceilings", "host")),
        Part("whole orthogonalizations", 75, figures("orthogonalizations")),
        Part("products", 60, figures("products")),
        Part("steps beside other optimizers", 120, benchmark),
        Part("hosts", 240, tests("tests/gpu/test_hosts.py")),
        Part("steps and messages, beside the model", 60, figures("steps", "exchange")),
        Part(
            "the rest",
            600,
            tests("tests/gpu", "--deselect=tests/gpu/test_nccl.py", "--deselect=tests/gpu/test_hosts.py"),
        ),
    ]


def main() -> int:
    """Run the parts for as long as there is time; the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts together (default 30)")
    chosen, options = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("No CUDA device: the tests in tests/gpu and benchmarks/gpu.py were not run. Nothing was tested.")
        return 0
    device = torch.cuda.get_device_name()
    print(f"Testing on {device}.", flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    file = RESULTS / f"{name}.json"  # with the date inside; commit it
    with shared_by_processes():
        return run(parts(file, options), RESULTS / f"{name}.txt", seconds=60 * chosen.minutes)


def run(commands: Sequence[Part], report: Path, *, seconds: float) -> int:
    """Run commands one after the other, whatever becomes of the others, and keep what they print in a file.

    A command is ended when its own time or that of all is over, with all that it has started, and told at the end.

    Returns:
        The exit code of the first that failed or was ended.
    """
    codes, unfinished, until = [], [], time.monotonic() + seconds
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with report.open("w") as report_file:

        def say(line: str) -> None:
            for stream in (sys.stdout, report_file):
                stream.write(line)
                stream.flush()

        for part in commands:
            remaining = until - time.monotonic()
            if remaining < min(LEAST, part.seconds):
                unfinished.append(f"{part.name}: not begun")
                continue
            say(f"\n## {part.name}\n\n")
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                part.command, cwd=REPOSITORY, env=environment, text=True, start_new_session=True, **pipes
            )
            limit = min(remaining, part.seconds)
            timer = Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                say(line)
            codes.append(process.wait())
            timer.cancel()
            if codes[-1] == -signal.SIGKILL:
                unfinished.append(f"{part.name}: ended after {limit:.0f} s")
        for line in unfinished:
            say(f"\nNot finished: {line}")
    print(f"\nA report to paste, all of the above: {report}")
    return next((code for code in codes if code), 0)


@contextlib.contextmanager
def shared_by_processes() -> Iterator[None]:
    """NVIDIA's multi-process service, where it starts: ranks on one GPU then run side by side, not in turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="muonmesh-mps-") as folder:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = control is not None and _started(control, folders)
        print(f"Multi-process service: {'on' if started else 'off'}.", flush=True)
        if started:
            os.environ |= folders
        try:
            yield
        finally:
            if started:
                assert control is not None
                subprocess.run(
                    [control], input="quit\n", text=True, env={**os.environ, **folders}, timeout=30, check=False
                )
                for key in folders:
                    os.environ.pop(key, None)


def _started(control: str, folders: dict[str, str]) -> bool:
    """Start the service and look whether a process can use the GPU through it; if not, end it."""
    environment = {**os.environ, **folders}
    probe = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    try:
        subprocess.run([control, "-d"], env=environment, timeout=20, check=True)
        subprocess.run(probe, env=environment, timeout=60, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([control], input="quit\n", text=True, env=environment, timeout=20, check=False)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
