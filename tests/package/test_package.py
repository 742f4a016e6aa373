"""What would be uploaded: it is built, its metadata are in order, and it works where nothing else of the project is.

`make package` runs this in an environment that has neither torch nor the project. Nothing is uploaded.
"""

from __future__ import annotations

import email
import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A matrix and a vector, stepped once; nothing but the package and torch is needed.
STEP = """
import importlib.metadata, pathlib, sys
import muonmesh, torch
import muonmesh as mm
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
optimizer = mm.from_model(model, lr=0.01)
before = model[1].weight.detach().clone()
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
assert not torch.equal(before, model[1].weight)
folder = pathlib.Path(mm.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert (folder / "py.typed").exists()
assert muonmesh.orthogonalize(torch.ones(3, 3), kernels="compiled").isfinite().all()
assert importlib.metadata.version("muonmesh") == muonmesh.__version__
print(muonmesh.__version__)
"""


def call(*command: object, cwd: Path | None = None, **variables: str) -> str:
    """Run a command without what this process has on its path; returns what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= variables
    run = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def refused_command(*command: object, cwd: Path) -> str:
    """Run a command that ends with the status of wrong usage; returns what it says."""
    run = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stdout + run.stderr
    return run.stderr


def unpacked(folder: Path) -> Path:
    """The sdist as a folder, so that builds leave nothing in the repository."""
    call(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def wheel_of(source: Path, folder: Path, **variables: str) -> Path:
    """A wheel that is built with these variables of the environment."""
    call(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source, **variables)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist; the wheel is built from the sdist, as `python -m build` does it."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has pip alone."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def test_the_index_would_take_it(built: dict[str, Path]) -> None:
    assert "PASSED" in call(sys.executable, "-m", "twine", "check", "--strict", *built.values())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_metadata_say_what_it_is(built: dict[str, Path]) -> None:
    fields = metadata(built["wheel"])
    assert (fields["Name"], fields["Version"]) == ("muonmesh", PROJECT["version"])
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Author"] == "The muonmesh developers"
    assert 60 < len(fields["Summary"]) < 512
    assert "PyTorch" in fields["Summary"]
    assert re.search(rf"^version: {re.escape(fields['Version'])}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in fields.get_all("Classifier")
    required = [entry for entry in fields.get_all("Requires-Dist") if "extra ==" not in entry]
    assert required == ["torch>=2.11"]


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", text))


def test_the_description_links_to_nothing_that_only_the_repository_has(built: dict[str, Path]) -> None:
    description = metadata(built["wheel"]).get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text()
    assert links(description) == {link for link in links(readme) if link.startswith(("https:", "#"))}
    assert re.findall(r"^#.*|^```.*", description, re.MULTILINE) == re.findall(r"^#.*|^```.*", readme, re.MULTILINE)
    for words, _ in re.findall(r"(?<!!)\[([^\]]+)\]\((docs/[^)]+)\)", readme):
        assert words in description  # the words of a link stay


def test_the_wheel_is_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = ROOT / "src"
    assert names == {
        str(path.relative_to(sources))
        for path in (sources / "muonmesh").rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    } | {"muonmesh/numerics/kernels/products.so"}
    assert re.fullmatch(r"py3-none-(linux|macosx)_.*", built["wheel"].stem.split("-", 2)[2])


def library(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("muonmesh/numerics/kernels/products.so", folder))


def told_here(built: Path, function: str) -> str:
    """The "variant" that this processor would take, or why it cannot use "tiles"."""
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1])[sys.argv[2]]; f.restype = ctypes.c_char_p; print(f())"
    return call(sys.executable, "-c", code, built, f"muonmesh_{function}")


def test_the_library_has_every_variant(built: dict[str, Path], tmp_path: Path) -> None:
    content = library(built["wheel"], tmp_path).read_bytes()
    for name in ("avx2", "avx512", "avx512bf16", "amx") if platform.machine() == "x86_64" else ("neon", "bf16"):
        assert f"\0muonmesh_multiply_{name}\0".encode() in content, name


def test_a_compiler_that_knows_no_bf16_builds_the_other_variants(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mavx512bf16*|*+bf16*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    built = library(wheel_of(unpacked(tmp_path), tmp_path / "dist", CC=str(compiler)), tmp_path)
    assert b"muonmesh_multiply_" in built.read_bytes()
    assert b"bf16\0" not in built.read_bytes()
    assert told_here(built, "variant").strip() in ("b'avx512'", "b'avx2'", "b'neon'")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_a_compiler_that_knows_no_amx_builds_the_other_variants(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mamx-*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    built = library(wheel_of(unpacked(tmp_path), tmp_path / "dist", CC=str(compiler)), tmp_path)
    assert b"muonmesh_multiply_avx512bf16\0" in built.read_bytes()
    assert b"_amx" not in built.read_bytes()
    assert "built without AMX" in told_here(built, "tiles")


def test_the_sdist_holds_licence_and_sources(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/muonmesh/__init__.py", "src/muonmesh/py.typed"} <= names
    assert {f"src/muonmesh/numerics/kernels/{name}.c" for name in ("products", "dispatch", "threads")} <= names


def test_the_changelog_has_a_section_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    version = PROJECT["version"]
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == ("Unreleased" if ".dev" in version else version)
    assert ".dev" in version or re.search(rf"^## {re.escape(version)}.*\n\n### Highlights\n\n- ", text, re.MULTILINE)


def test_without_a_compiler_it_installs_and_torch_multiplies(clean: Path, tmp_path: Path) -> None:
    """A wheel for every platform, without the library of an earlier build; the doctor says so, and all else works."""
    source = unpacked(tmp_path)
    wheel_of(source, tmp_path / "first")
    wheel = wheel_of(source, tmp_path / "second", CC="/nonexistent/cc")
    assert wheel.stem.endswith("-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith((".so", ".c"))] == []
    pip = [clean, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, "typer")
    try:
        code = STEP.replace(', kernels="compiled"', "")
        assert code != STEP
        assert call(clean, "-c", code, cwd=tmp_path).strip() == PROJECT["version"]
        doctor = "from muonmesh.tools.cli.installation import products_here; print(products_here().result)"
        message = call(clean, "-c", doctor, cwd=tmp_path)
    finally:
        call(*pip, "uninstall", "--quiet", "--yes", "muonmesh", "typer")
    assert "none. Found no products.so in the package" in message
    assert "torch multiplies. To have them, build the package where there is a C compiler" in message


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_steps_in_a_clean_environment(built: dict[str, Path], clean: Path, tmp_path: Path, kind: str) -> None:
    pip = [clean, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", built[kind])
    assert "No broken requirements" in call(*pip, "check")
    assert call(clean, "-c", STEP, cwd=tmp_path).strip() == PROJECT["version"]
    assert call(clean, "-m", "muonmesh", "--version", cwd=tmp_path).startswith(f"muonmesh {PROJECT['version']} (torch ")
    assert "pip install 'muonmesh[train]'" in refused_command(clean.parent / "muonmesh", "train", cwd=tmp_path)
    call(*pip, "uninstall", "--quiet", "--yes", "muonmesh")
