"""The products in C under the address and undefined-behaviour sanitizers: random sizes, strides and values."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from muonmesh.numerics.kernels import compiled

ROOT = Path(__file__).parents[2]
SOURCE = Path(compiled.__file__).with_name("products.c")
ARCHITECTURE = {"avx2": "x86-64-v3", "avx512": "x86-64-v4", "avx512bf16": "x86-64-v4", "neon": "armv8-a"}
ARCHITECTURE |= {"bf16": "armv8.2-a+bf16"}
RUNS = {"avx2": ["avx2"], "avx512": ["avx2", "avx512"], "avx512bf16": ["avx2", "avx512", "avx512bf16"]}
RUNS |= {"neon": ["neon"], "bf16": ["neon", "bf16"]}


def sanitized(folder: Path, variant: str, source: Path = SOURCE) -> Path:
    """Build the driver with a variant; the linker needs the sanitizers' libraries, which come with the compiler."""
    flags = [f"-march={ARCHITECTURE[variant]}", *(["-mavx512bf16"] if variant == "avx512bf16" else [])]
    flags += ["-O1", "-g", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w"]
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    sources = [str(source), str(ROOT / "tests" / "products_driver.c")]
    target = folder / f"driver-{variant}"
    subprocess.run([compiler, *flags, f"-DVARIANT={variant}", *sources, "-lm", "-o", str(target)], check=True)
    return target


def ran(driver: Path, seed: int, count: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run([driver, str(seed), str(count)], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_sanitizers_find_nothing(tmp_path: Path, products: None, count: int) -> None:
    """All variants that this processor runs, against sums in fp64, with the same bits in all results; a quarter of the
    cases have any bits at all, and a quarter rows below 2^-126."""
    found = set()
    for variant in RUNS[compiled.library().variant]:
        done = ran(sanitized(tmp_path, variant), count, count)
        assert done.returncode == 0, f"{variant}, {platform.machine()}: {done.stderr[-3000:]}"
        error, bits = done.stdout.split()
        assert float(error) < 1.01, variant
        found.add(bits)
    assert len(found) == 1


def test_sanitizers_find_an_element_too_far(tmp_path: Path, products: None) -> None:
    """A loop that writes whole vectors at the end of a row is found."""
    text = SOURCE.read_text()
    faulty = tmp_path / "faulty.c"
    faulty.write_text(text.replace("else memcpy(to, &h, some * sizeof(bf16));", "else memcpy(to, &h, sizeof h);"))
    assert faulty.read_text() != text
    done = ran(sanitized(tmp_path, RUNS[compiled.library().variant][-1], faulty), 0, 20)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr


def shared(folder: Path, sanitizers: str, source: Path) -> subprocess.CompletedProcess[str]:
    """Build and run the driver of `threads.c`."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-w"]
    target = folder / f"shared-{sanitizers.partition(',')[0]}"
    sources = [str(source), str(ROOT / "tests" / "threads_driver.c")]
    subprocess.run([compiler, *flags, *sources, "-lpthread", "-o", str(target)], check=True)
    return subprocess.run([target], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_that_share_a_product_do_not_race(tmp_path: Path, products: None, sanitizers: str) -> None:
    done = shared(tmp_path, sanitizers, SOURCE.with_name("threads.c"))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-3000:]


def test_a_caller_that_does_not_wait_for_its_helpers_is_found(tmp_path: Path, products: None) -> None:
    text = SOURCE.with_name("threads.c").read_text()
    faulty = tmp_path / "faulty.c"
    faulty.write_text(text.replace("while (mine.running) pthread_cond_wait(&mine.ended, &lock);", ""))
    assert faulty.read_text() != text
    assert any(shared(tmp_path, "thread", faulty).returncode for _ in range(5))  # if some helper gets a core in time
