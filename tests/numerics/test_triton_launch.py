"""What a device would be told when a kernel is started, by Triton's own driver over one that only writes it down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COVERS = ("numerics.kernels.triton_launch.Launch",)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver, and for what Triton has compiled."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    flags = ["-O2", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([compiler, *flags, str(ROOT / "tests/support/launch_driver.c")], check=True)
    return library.parent


def told_to_driver(folder: Path, *options: str) -> list[Any]:
    """Return what `tests.support.launches` prints."""
    folders = {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}
    environment = {**os.environ, **folders, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.support.launches", *options]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_a_launch_tells_the_device_what_tritons_own_would(folder: Path) -> None:
    """The same code, programs, threads, parameters and stream, which says the device; found anew and looked up.

    Shapes, strides, dtypes and addresses follow each other, of which each asks for other code under the same name.
    """
    launches = told_to_driver(folder)
    assert len(launches) > 20
    for launch in launches:
        assert launch["found"] == [launch["expected"]] * 2, launch["name"]
        assert launch["expected"]["last_stream"] == 1001, "the stream of cuda:1, though cuda:0 is the current device"


@pytest.mark.slow
def test_what_is_started_again_is_what_was_worked_out(folder: Path) -> None:
    """The same kernels in the same order on the same stream, with the addresses of the tensors that are given now."""
    (cases,) = told_to_driver(folder, "--again")
    assert len(cases) == 2
    for case in cases:
        first, *others = case["launches"]
        assert case["kept"] == ["Recording"]
        assert len(first) > 15
        assert {stream for _, stream, _, _ in first} == {1001}
        assert any("0: " in str(arguments) for *_, arguments in first)
        assert others == [first] * 4
