"""Installation: checks this machine and this installation in seconds, with one line for each check."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from muonmesh.numerics.kernels import auto_takes
from muonmesh.numerics.kernels.compiled import NoLibrary, library
from muonmesh.tools.cli.launch import usable_cores

TESTED = ("2.11", "2.13")  # versions of torch with which all tests run
TESTED_IN_PART = "2.15"  # the quick tests of one process


class Finding(NamedTuple):
    """The result of one check: the subject, the finding, and what to do (empty if nothing is wrong)."""

    subject: str
    result: str
    remedy: str = ""


def check_installation() -> list[Finding]:
    """Run all checks and return their findings; a check that fails is a finding too."""
    looks: dict[str, Callable[[], Finding]] = {
        "torch": _torch,
        "processor": _processor,
        "compiled products": products_here,
        "orthogonalize": _orthogonalize,
        "NCCL": _nccl,
    }
    return [_finding_of(name, look) for name, look in looks.items()]


def _finding_of(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}", "Mend this first")


def _torch() -> Finding:
    tested = f"muonmesh is tested with torch {' and '.join(TESTED)}, in part with {TESTED_IN_PART}"
    return Finding("torch", f"{torch.__version__}, Python {platform.python_version()}. {tested}")


def _processor() -> Finding:
    names = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "no GPU"
    return Finding("processor", f"{torch.backends.cpu.get_cpu_capability()}, {usable_cores()} cores, {names}")


def products_here() -> Finding:
    """Return which variant of the compiled products this processor runs, and whether it can run that of AMX."""
    try:
        variant = library().variant
    except NoLibrary as error:
        mend = f" To have them, {error.mend}" if error.mend else ""
        return Finding("compiled products", f"none. Found {error}. torch multiplies.{mend}")
    order, gain = auto_takes()
    choice = 'kernels="auto" takes torch\'s products, which may be faster on such a CPU'
    if order:
        upto = f"{gain.start} to {gain[-1]}" if gain.stop < sys.maxsize else f"{gain.start} or more"
        choice = f'kernels="auto" takes them for bf16 matrices of {upto} rows'
    try:
        tiles = f'kernels="{library("amx").variant}" is possible too'
    except NoLibrary as error:
        tiles = f'kernels="amx" is not possible: {error}'
    return Finding("compiled products", f"variant {variant}. {choice}. {tiles}")


def _orthogonalize() -> Finding:
    """Compare the default iteration with this machine's bf16 products to the same iteration in fp64."""
    import muonmesh as mm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(device)
    exact = mm.orthogonalize(x.double(), dtype=torch.float64, kernels="torch")
    apart = float((mm.orthogonalize(x).double() - exact).norm() / exact.norm())
    wrong = "" if apart < 0.03 else "Write kernels='torch', and report it"
    return Finding("orthogonalize", f"bf16 products on {device} are {apart:.1%} from fp64", wrong)


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("NCCL", "no GPU, not needed")
    if not dist.is_nccl_available():
        return Finding("NCCL", "torch was built without it", "Install torch for CUDA")
    return Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]


def lines_of(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding."""
    for subject, result, remedy in findings:
        yield f"{'do  ' if remedy else 'ok  '}{subject}: {result}" + (f". {remedy}" if remedy else "")
