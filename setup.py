"""What pyproject.toml cannot say: the README as a package index shows it, and the library of products for CPUs."""

import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

KERNELS = Path("src", "muonmesh", "numerics", "kernels")
SOURCES = [str(KERNELS / name) for name in ("products.c", "dispatch.c", "threads.c")]
# Each has a fused multiply-add, without which the bits would be others. clang would use half of a vector of AVX-512.
X86 = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
    "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"],
}
ARM = {"neon": ["-march=armv8-a"], "bf16": ["-march=armv8.2-a+bf16"]}
VARIANTS = {"x86_64": X86, "aarch64": ARM, "arm64": ARM} if sys.platform in ("linux", "darwin") else {}
# No contraction: a product and a sum that the source rounds one after the other stay two, with every compiler.
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w"]


class BuildLibrary(build_ext):
    """Build a plain library for ctypes, without Python's or torch's ABI: one object for each set of instructions."""

    built = False

    def get_ext_filename(self, fullname: str) -> str:
        """Return its path, whose name has no version of Python in it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile products.c for each set of instructions, and the other files."""
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # of an earlier build, which this may not replace
        machine = self.plat_name.rpartition("-")[2]  # what a cross compiler builds for: _PYTHON_HOST_PLATFORM says it
        machine = platform.machine() if machine == "universal2" else machine
        variants = VARIANTS.get(machine)
        if variants is None:
            raise PlatformError(f"no products for {machine} on {sys.platform}")  # a warning: it is optional
        objects, known = [], dict.fromkeys(variants, 0)
        for name, flags in variants.items():
            with suppress(CompileError):  # an older compiler may not know these instructions, but others
                objects += self.compiler.compile(
                    SOURCES[:1],
                    output_dir=os.path.join(self.build_temp, name),
                    macros=[("VARIANT", name)],
                    extra_preargs=[*FLAGS, *flags],
                )
                known[name] = 1
        if not any(known.values()):
            raise PlatformError("no C compiler that knows the instructions of any variant")
        macros = [(f"WITH_{name}", str(is_known)) for name, is_known in known.items()]
        objects += self.compiler.compile(SOURCES[1:], output_dir=self.build_temp, macros=macros, extra_preargs=FLAGS)
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), libraries=["m", "pthread"])
        self.built = True


class Wheel(bdist_wheel):
    """Tag the wheel with its platform alone, or with none where no library could be built."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: py3-none-linux_x86_64, say."""
        return "py3", "none", super().get_tag()[2] if self.get_finalized_command("build_ext").built else "any"


def description() -> str:
    """Return the README without the pictures, and with the paths of other pages as words instead of links."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    # Optional: where there is no C compiler the package installs without the library, and torch multiplies.
    ext_modules=[Extension("muonmesh.numerics.kernels.products", SOURCES, optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
