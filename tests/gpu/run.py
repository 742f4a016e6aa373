"""`make test-gpu`: the first minute, tests and benchmark that need CUDA, or plain words that nothing was tested.

python -m tests.gpu.run [options of benchmarks/gpu.py]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"


def main() -> int:
    """Measure for a minute, run the tests, then the benchmark; the exit code of the first that fails."""
    if not torch.cuda.is_available():
        print("No CUDA device: the tests in tests/gpu and benchmarks/gpu.py were not run. Nothing was tested.")
        return 0
    device = torch.cuda.get_device_name()
    print(f"Testing on {device}.", flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    file = RESULTS / f"{name}.json"  # with the date inside; commit it
    first = [sys.executable, "-m", "tests.gpu.first"]
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-n", "0", "-rf", "--color=no"]
    benchmark = [sys.executable, "benchmarks/gpu.py", "--json", str(file), *sys.argv[1:]]
    return run([first, tests, benchmark], RESULTS / f"{name}.txt")


def run(commands: Sequence[Sequence[str]], report: Path) -> int:
    """Run commands one after the other, whatever becomes of the others, and keep what they print in a file.

    Returns:
        The exit code of the first that failed.
    """
    codes, environment = [], {**os.environ, "PYTHONUNBUFFERED": "1"}
    with report.open("w") as kept:
        for command in commands:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)
            assert process.stdout is not None
            for line in process.stdout:
                for place in (sys.stdout, kept):
                    place.write(line)
                    place.flush()
            codes.append(process.wait())
    print(f"\nA report to paste, all of the above: {report}")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
