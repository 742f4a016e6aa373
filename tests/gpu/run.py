"""`make test-gpu`: the tests and the benchmark that need CUDA, or plain words that nothing was tested.

python -m tests.gpu.run [options of benchmarks/gpu.py]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]


def main() -> int:
    """Run the tests, then the benchmark; the exit code of the first that fails."""
    if not torch.cuda.is_available():
        print("No CUDA device: the tests in tests/gpu and benchmarks/gpu.py were not run. Nothing was tested.")
        return 0
    device = torch.cuda.get_device_name()
    print(f"Testing on {device}.", flush=True)
    file = f"benchmarks/results/{device.lower().replace(' ', '-')}.json"  # with the date inside; commit it
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu"]
    benchmark = [sys.executable, "benchmarks/gpu.py", "--json", file, *sys.argv[1:]]
    for command in (tests, benchmark):
        if code := subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
