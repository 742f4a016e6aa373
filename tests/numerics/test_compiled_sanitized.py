"""The products in C under the address and undefined-behaviour sanitizers: random sizes, strides and values.

Of the variant amx the tiles are emulated, and where the processor has tiles, its own must give the same bits.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from muonmesh.numerics.kernels import compiled
from tests.support.emulated import RUNS, SOURCES, compile_c, compiler

DRIVER = Path(__file__).parents[1] / "support/products_driver.c"
SOURCE = SOURCES / "products.c"
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def driver(folder: Path, variant: str, *options: str) -> Path:
    """Build the driver with a variant; the linker needs the sanitizers' libraries, which come with the compiler."""
    sources = [SOURCE, DRIVER, *([SOURCES / "dispatch.c"] if variant == "amx" else [])]
    defines = [f"-DWITH_{name}=1" for name in (*RUNS["avx512bf16"], "amx")]
    return compile_c(folder / f"driver-{variant.replace(' ', '-')}", variant, sources, *options, *defines)


Linked = Callable[..., Path]


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Linked:
    """`linked(source, variant, *options)` is the driver with another products.c; it is compiled once."""
    folder = tmp_path_factory.mktemp("linked")

    @functools.cache
    def driver_object(variant: str, options: tuple[str, ...]) -> Path:
        name = f"driver-{len(list(folder.iterdir()))}.o"
        return compile_c(folder / name, variant, [DRIVER], *options, "-c")

    def build(source: Path, variant: str, *options: str) -> Path:
        sources = [source, driver_object(variant, options)]
        return compile_c(source.with_suffix(""), variant, sources, *options)

    return build


def ran_sanitized(built: Path, seed: int, count: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run([built, str(seed), str(count)], env=environment, capture_output=True, text=True, check=False)


def bits_of(folder: Path, variant: str, seed: int, count: int) -> str:
    """Run a variant under the sanitizers, and return the number that all bits of its results follow from."""
    process = ran_sanitized(driver(folder, variant, *SANITIZED), seed, count)
    assert process.returncode == 0, f"{variant}, {platform.machine()}: {process.stderr[-3000:]}"
    error, bits = process.stdout.split()
    assert float(error) < 1.01, variant
    return bits


COUNTS = pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.soak)])


@COUNTS
def test_sanitizers_find_nothing(tmp_path: Path, products: None, count: int) -> None:
    """All variants that this processor runs, against sums in fp64, with the same bits in all results; a quarter of the
    cases have any bits at all, and a quarter rows below 2^-126."""
    variants = RUNS[compiled.library().variant]
    assert len({bits_of(tmp_path, variant, count, count) for variant in variants}) == 1


@COUNTS
def test_sanitizers_find_nothing_beside_emulated_tiles(tmp_path: Path, emulated_amx: Path, count: int) -> None:
    """Nor does a call leave another configuration of tiles than the one of its caller."""
    assert bits_of(tmp_path, "emulated amx", count, count)


@COUNTS
def test_tiles_have_the_bits_of_their_emulation(tmp_path: Path, emulated_amx: Path, count: int) -> None:
    try:
        compiled.library("amx")
    except compiled.NoLibrary as error:
        pytest.skip(str(error))
    assert bits_of(tmp_path, "amx", count, count) == bits_of(tmp_path, "emulated amx", count, count)


def faulty(folder: Path, right: str, wrong: str) -> Path:
    text = SOURCE.read_text()
    assert right in text
    file = folder / "faulty.c"
    file.write_text(text.replace(right, wrong))
    return file


def test_sanitizers_find_an_element_too_far(tmp_path: Path, products: None, linked: Linked) -> None:
    """A loop that writes whole vectors at the end of a row is found."""
    source = faulty(tmp_path, "else memcpy(to, &h, count * sizeof(bf16));", "else memcpy(to, &h, sizeof h);")
    process = ran_sanitized(linked(source, RUNS[compiled.library().variant][-1], *SANITIZED), 0, 20)
    assert process.returncode != 0
    assert "ERROR: AddressSanitizer" in process.stderr


RESTORED = "  if (before->palette) _tile_loadconfig(before);\n  else _tile_release();"
FAULTS = {
    "the other half of a panel": ("_tile_dpbf16ps(1, 4, 7);", "_tile_dpbf16ps(1, 4, 6);", ""),
    "the next pair, not the next 16": ("packed += PAIRS * WIDTH) {\n    _tile", "packed += WIDTH) {\n    _tile", ""),
    "operands exchanged": ("_tile_dpbf16ps(0, 4, 6);", "_tile_dpbf16ps(0, 6, 4);", ""),
    "rows of A half as far apart": ("of_a = ld * sizeof(bf16);", "of_a = ld;", ""),
    "a tile that is not zeroed": ("    _tile_zero(3);\n", "", ""),
    "even members where odd ones are": ("low | high << 16", "high | low << 16", ""),
    "no zeros after a column": ("(pairs_of(chunk) * WIDTH - written)", "0 * written", ""),
    "an end within a tile": ("rows == ROWS && depth % (2 * PAIRS) == 0 && ", "rows == ROWS && ", "AddressSanitizer"),
    "fewer rows than a tile": ("rows == ROWS && depth % (2", "depth % (2", "AddressSanitizer"),
    "tiles released that somebody had configured": (RESTORED, "  _tile_release();", ""),
    "tiles configured that nobody had": (RESTORED, "  _tile_loadconfig(before->palette ? before : &of_products);", ""),
    "one row too few in a tile": ("{16, 16, ", "{15, 16, ", "#UD: rows"),
    "no configuration": ("  _tile_loadconfig(wanted);\n", "", "#UD"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_variant_amx_shows(tmp_path: Path, emulated_amx: Path, linked: Linked, fault: str) -> None:
    """In sums, in memory beside an operand, in the configuration that a call leaves, or as what a processor refuses."""
    right, wrong, message = FAULTS[fault]
    options = SANITIZED if message == "AddressSanitizer" else ("-O1",)
    process = ran_sanitized(linked(faulty(tmp_path, right, wrong), "emulated amx", *options), 1, 60)
    if message:
        assert message in process.stderr
    else:
        assert not float(process.stdout.split()[0]) < 1.01, process.stdout


def shared(folder: Path, sanitizers: str, source: Path) -> subprocess.CompletedProcess[str]:
    """Build and run the driver of `threads.c`."""
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-w"]
    target = folder / f"shared-{sanitizers.partition(',')[0]}"
    sources = [str(source), str(DRIVER.with_name("threads_driver.c"))]
    subprocess.run([compiler(), *flags, *sources, "-lpthread", "-o", str(target)], check=True)
    return subprocess.run([target], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_that_share_a_product_do_not_race(tmp_path: Path, products: None, sanitizers: str) -> None:
    process = shared(tmp_path, sanitizers, SOURCE.with_name("threads.c"))
    assert (process.returncode, process.stdout) == (0, "fine\n"), process.stderr[-3000:]


def test_a_caller_that_does_not_wait_for_its_helpers_is_found(tmp_path: Path, products: None) -> None:
    text = SOURCE.with_name("threads.c").read_text()
    faulty = tmp_path / "faulty.c"
    faulty.write_text(text.replace("while (mine.running) pthread_cond_wait(&mine.ended, &lock);", ""))
    assert faulty.read_text() != text
    assert any(shared(tmp_path, "thread", faulty).returncode for _ in range(5))  # if some helper gets a core in time
