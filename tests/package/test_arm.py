"""The wheel for 64-bit ARM, built by a cross compiler: its library in an emulator has the bits of this processor.

On Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user. Python and torch do not run there, so
what ctypes and torch do on ARM is not tried, nor how fast its products are.
"""

from __future__ import annotations

import platform
import shutil
import struct
from pathlib import Path

import pytest

from tests.package.test_package import ROOT, call, library, unpacked, wheel_of

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
KERNELS = ROOT / "src" / "muonmesh" / "numerics" / "kernels"
DRIVER = ROOT / "tests/support/products_driver.c"
OPTIONS = ["-O2", "-ffp-contract=off", "-w"]

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, (CROSS, EMULATOR))), reason=f"this machine has no {CROSS} or no {EMULATOR}"
)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the wheel for ARM."""
    folder = tmp_path_factory.mktemp("arm")
    wheel = wheel_of(unpacked(folder), folder / "dist", CC=CROSS, _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert wheel.stem.endswith("-py3-none-linux_aarch64")
    return library(wheel, folder)


def emulated(processor: str, driver: Path, *arguments: object) -> str:
    return call(EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, driver, *arguments).strip()


def linked(built: Path, variant: str) -> Path:
    driver = built.with_name(f"driver-{variant}")
    call(CROSS, *OPTIONS, f"-DVARIANT={variant}", DRIVER, built, f"-Wl,-rpath,{built.parent}", "-lm", "-o", driver)
    return driver


def test_the_library_is_one_of_arm(arm: Path) -> None:
    assert struct.unpack_from("<H", arm.read_bytes(), 18) == (183,)  # e_machine: EM_AARCH64


@pytest.mark.parametrize(("processor", "variant"), [("max", "bf16"), ("cortex-a72", "neon")])
def test_a_processor_takes_its_variant(arm: Path, processor: str, variant: str) -> None:
    assert emulated(processor, linked(arm, "neon")) == variant


def test_both_variants_agree_with_fp64_and_have_the_bits_of_this_processor(arm: Path, tmp_path: Path) -> None:
    """300 random sizes: strides, batches, parts, symmetric results, rows below 2^-126, NaN and inf."""
    driver = tmp_path / "driver"
    native = ["-march=x86-64-v3", "-DVARIANT=avx2"] if platform.machine() == "x86_64" else ["-DVARIANT=neon"]
    call("cc", *OPTIONS, *native, KERNELS / "products.c", DRIVER, "-lm", "-o", driver)
    outputs = {"here": call(driver, 7, 300).strip()}
    outputs |= {variant: emulated("max", linked(arm, variant), 7, 300) for variant in ("neon", "bf16")}
    assert len(set(outputs.values())) == 1, outputs
    assert float(outputs["bf16"].split()[0]) < 1.01
