"""Arrows between the parts of the package point one way, and only some of them may communicate.

The sources are parsed, not imported, so imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# From the top down. A part imports itself and what lies below it, never its neighbours, never upwards.
LEVELS = (
    ("tools.cli",),
    ("tools.auditing", "tools.checkpoints", "tools.testing"),
    ("tools.forecasts", "tools.migration"),
    ("integrations", "tools"),
    ("build",),
    ("optimizer",),
    ("checkpoint", "clip", "report"),
    ("step",),
    ("settings",),
    ("comm", "groups"),
    ("files", "layout", "names", "numerics", "table"),
    ("numerics.kernels",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
ANYONE = "errors"
PUBLIC = ""  # muonmesh itself: the public names, which only the top level may use
FACES = ("muonmesh", "muonmesh.checkpoint", "muonmesh.testing")  # the files that offer names of other parts
TOP = ("integrations", "tools")
COMMUNICATES = (
    "comm",
    "checkpoint",
    "clip",
    "integrations",
    "tools.auditing",
    "tools.checkpoints",
    "tools.cli",
    "tools.testing",
)
BEYOND_TORCH = ("tools.cli", "integrations")  # may import other packages

# What sends or makes others wait, among the names of torch.distributed and its submodules.
COLLECTIVE = re.compile(
    r"(all_(reduce|gather|to_all)|reduce|gather|scatter|broadcast|i?send|i?recv|batch_isend_irecv|barrier"
    r"|monitored_barrier|distribute_|new_group|new_subgroups|split_group|shrink_group|init_process_group"
    r"|init_device_mesh)"
)
# The same as methods of a DTensor or of a ProcessGroup.
COLLECTIVE_METHOD = re.compile(
    r"(full_tensor|redistribute|_?(all_?(reduce|gather|to_?all)|reduce_scatter|broadcast_)\w*)$"
)


def part_of(module: str) -> str | None:
    """The part of the package that `muonmesh.a.b.c` belongs to; None for other packages."""
    names = module.split(".")
    if names[0] != "muonmesh":
        return None
    if names[1:] == ["__main__"]:
        return "tools.cli"
    if names[1:2] == [ANYONE]:
        return ANYONE
    return next((part for part in (".".join(names[1:3]), *names[1:2]) if part in LEVEL), PUBLIC)


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[int, str, str]]:
    """The line, the local name and the full dotted name of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -(node.level - is_package) or None]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{base}.{alias.name}"


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for an expression that is just that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def arrow_is_allowed(part: str, target: str) -> bool:
    if part in (PUBLIC, target):
        return True
    if part == "numerics.kernels" or part == ANYONE:
        return False
    if target == ANYONE:
        return True
    if target == PUBLIC:
        return part.split(".")[0] in TOP
    return LEVEL[target] > LEVEL[part]


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What `module` does against the direction of the tree, one line each."""
    part = PUBLIC if module in FACES and is_package | (module == "muonmesh.testing") else part_of(module)
    assert part is not None
    errors: list[str] = []
    if part == PUBLIC and module not in FACES:
        return [f"{module}: has no place among the levels of this test and of the design"]
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for line, local, full in imports(module, tree, is_package):
        names[local] = full
        target = part_of(full)
        top = full.split(".")[0]
        if target is not None and not arrow_is_allowed(part, target):
            errors.append(f"{module}:{line}: {part} imports {full}")
        if part == "layout" and top == "torch":
            errors.append(f"{module}:{line}: layout is plain Python and imports {full}")
        allowed = {"muonmesh", "torch"} | ({"triton"} if part == "numerics.kernels" else set())
        if top not in allowed and top not in sys.stdlib_module_names and part not in BEYOND_TORCH:
            errors.append(f"{module}:{line}: the core depends on torch alone and imports {full}")
    references = [(line, full) for line, _, full in imports(module, tree, is_package)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and (name := dotted(node)) is not None:
            first, _, rest = name.partition(".")
            full = names.get(first, first)
            references.append((node.lineno, f"{full}.{rest}" if rest else full))
        if isinstance(node, ast.Attribute) and part not in COMMUNICATES and COLLECTIVE_METHOD.match(node.attr):
            errors.append(f"{module}:{node.lineno}: {part} communicates: .{node.attr}")
    for line, full in references:
        if not re.match(r"torch\.(distributed|ops\._?c10d)", full):
            continue
        if part in ("numerics", "numerics.kernels"):
            errors.append(f"{module}:{line}: {part} is tensor maths on whole matrices and uses {full}")
        elif part not in COMMUNICATES and COLLECTIVE.match(full.split(".")[-1]):
            errors.append(f"{module}:{line}: {part} communicates: {full}")
    return sorted(set(errors))


def test_the_tree_keeps_its_direction() -> None:
    errors: list[str] = []
    parts: set[str | None] = set()
    for file in sorted((SOURCE / "muonmesh").rglob("*.py")):
        names = file.relative_to(SOURCE).with_suffix("").parts
        is_package = names[-1] == "__init__"
        module = ".".join(names[:-1] if is_package else names)
        parts.add(part_of(module))
        errors += violations(module, file.read_text(), is_package=is_package)
    assert {PUBLIC, ANYONE, "tools.cli", "integrations", "comm", "numerics", "numerics.kernels", "layout"} <= parts
    assert not errors, "\n" + "\n".join(errors)


def test_a_step_imports_no_tool() -> None:
    """The core is what trains: neither importing it nor a step, clipping, metrics or a checkpoint loads a tool.

    Its parts need no import of their own, in a process where nothing has imported them.
    """
    script = """
import sys, tempfile, torch, muonmesh
model = torch.nn.Linear(8, 4)
optimizer = muonmesh.from_model(model)
model(torch.ones(1, 8)).sum().backward()
optimizer.clip_grad_norm_(1.0)
optimizer.step()
print(optimizer.explain(), optimizer.metrics(), optimizer.state_dict().keys())
with tempfile.TemporaryDirectory() as folder:
    muonmesh.checkpoint.save(folder + "/saved", model, optimizer)
    muonmesh.checkpoint.load(folder + "/saved", model, optimizer)
assert [name for name in sys.modules if name.startswith("muonmesh.tools")] == []
assert not hasattr(muonmesh, "chekpoint")
muonmesh.testing.prove_rule
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr.strip()) == (0, ""), process.stderr


def test_no_file_imports_itself_through_others() -> None:
    """Within a room too: what a file needs stands on files below it."""
    arrows: dict[str, set[str]] = {}
    for file in sorted((SOURCE / "muonmesh").rglob("*.py")):
        names = file.relative_to(SOURCE).with_suffix("").parts
        if names[-1] != "__init__":
            module = ".".join(names)
            arrows[module] = {full for _, _, full in imports(module, ast.parse(file.read_text()), is_package=False)}
    for module, full in arrows.items():
        arrows[module] = {other for other in arrows for name in full if name == other or name.startswith(f"{other}.")}
    below: set[str] = set()
    while fresh := [m for m, others in arrows.items() if m not in below and others <= below]:
        below.update(fresh)
    assert sorted(arrows.keys() - below) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("muonmesh.layout.plan", "import torch"),
        ("muonmesh.layout.plan", "def f():\n    from torch import Tensor"),
        ("muonmesh.layout.plan", "from muonmesh.numerics.scale import update_scale"),
        ("muonmesh.layout.plan", "from ..comm import exchange"),
        ("muonmesh.layout", "from ..comm.exchange import Exchange"),
        ("muonmesh.numerics.scale", "import torch.distributed as dist"),
        ("muonmesh.numerics.scale", "from torch import distributed"),
        ("muonmesh.numerics.scale", "import torch\nx = torch.distributed.get_rank()"),
        ("muonmesh.numerics.scale", "from torch.distributed.tensor import DTensor"),
        ("muonmesh.numerics.scale", "from muonmesh.layout import Region"),
        ("muonmesh.numerics.scale", "import muonmesh.optimizer"),
        ("muonmesh.numerics.scale", "import muonmesh"),
        ("muonmesh.numerics.scale", "from muonmesh import Muon"),
        ("muonmesh.numerics.kernels.cpu", "from muonmesh.numerics.scale import update_scale"),
        ("muonmesh.numerics.kernels.cpu", "from .. import scale"),
        ("muonmesh.numerics.kernels", "from .. import scale"),
        ("muonmesh.numerics.kernels.cpu", "from muonmesh.errors import LayoutError"),
        ("muonmesh.numerics.kernels.cpu", "import torch.distributed"),
        ("muonmesh.comm.exchange", "from muonmesh.optimizer import Muon"),
        ("muonmesh.comm.exchange", "from ..clip import clip_grad_norm_"),
        ("muonmesh.clip", "from .checkpoint import restore_state"),
        ("muonmesh.groups", "from muonmesh.comm.placing import storage_of"),
        ("muonmesh.step.muon_step", "from muonmesh.clip import clip_gradients"),
        ("muonmesh.settings", "from muonmesh.step.parameter_steps import ParameterStep"),
        ("muonmesh.groups", "import transformers"),
        ("muonmesh.optimizer", "import numpy as np"),
        ("muonmesh.optimizer", "from muonmesh.tools.cli import main"),
        ("muonmesh.optimizer", "if TYPE_CHECKING:\n    from muonmesh.integrations import deepspeed"),
        ("muonmesh.optimizer", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("muonmesh.optimizer", "import torch.distributed\ntorch.distributed.barrier()"),
        ("muonmesh.optimizer", "import torch\ntorch.distributed.all_gather_object(y, x)"),
        ("muonmesh.optimizer", "from torch import distributed as d\nf = partial(d.broadcast, src=0)"),
        ("muonmesh.optimizer", "from torch.distributed import all_to_all_single as swap"),
        ("muonmesh.optimizer", "import torch.distributed.nn.functional as F\nF.all_reduce(x)"),
        ("muonmesh.optimizer", "import torch\ntorch.ops._c10d_functional.all_reduce(x)"),
        ("muonmesh.optimizer", "group.allreduce([x])"),
        ("muonmesh.report", "state = parameter.full_tensor()"),
        ("muonmesh.step", "from torch.distributed.tensor import distribute_tensor"),
        ("muonmesh.errors", "from muonmesh.layout import Region"),
        ("muonmesh.utils", "x = 1"),
        ("muonmesh", "import numpy"),
    ],
)
def test_an_arrow_against_the_grain_is_found(module: str, source: str) -> None:
    is_package = module in ("muonmesh", "muonmesh.layout", "muonmesh.numerics.kernels")
    assert len(violations(module, source, is_package=is_package)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("muonmesh", "from muonmesh.optimizer import Muon\nfrom .numerics import orthogonalize"),
        ("muonmesh.tools.cli.train", "import muonmesh as mm\nimport transformers\nimport torch.distributed as dist"),
        ("muonmesh.tools.cli.train", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("muonmesh.optimizer", "from torch.distributed import ProcessGroup\nfrom .comm.exchange import Exchange"),
        ("muonmesh.optimizer", "from . import clip, errors\nfrom .numerics.kernels import select"),
        ("muonmesh.comm.exchange", "import torch.distributed as dist\ndist.all_to_all_single(x, y)"),
        ("muonmesh.comm.exchange", "from ..layout.plan import Plan\nfrom ..numerics import rules"),
        ("muonmesh.clip", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("muonmesh.step", "from torch.distributed.tensor import DTensor"),
        ("muonmesh.numerics.newton_schulz", "import math\nimport torch\nfrom .kernels import select"),
        ("muonmesh.numerics.newton_schulz", "from functools import reduce\nx = reduce(f, torch.split(y, 3))"),
        ("muonmesh.numerics.kernels.cuda", "import triton\nfrom .table import Table"),
        ("muonmesh.layout.plan", "from dataclasses import dataclass\nfrom .region import Region"),
        ("muonmesh.layout", "from .region import Region\nfrom muonmesh.errors import PlanError"),
    ],
)
def test_what_the_design_allows_is_not_found(module: str, source: str) -> None:
    assert violations(module, source, is_package=module in ("muonmesh", "muonmesh.layout")) == []


def test_no_test_imports_another() -> None:
    """What two test files need stands in tests/support. The tests of hosts have environments of their own."""
    imports_of_tests = []
    for file in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        for line, _, full in imports(file.stem, ast.parse(file.read_text()), is_package=False):
            parts = full.split(".")
            named = any(part.startswith("test_") for part in parts[:3])
            if parts[0] == "tests" and named and parts[1] not in ("hosts", "package"):
                imports_of_tests.append(f"{file.name}:{line}: {full}")
    assert imports_of_tests == []


def test_loading_never_executes() -> None:
    """Invariant 9: whatever a user could have been handed is read by torch's restricted reader or by our own."""
    loads, unpicklers = [], []
    for file in sorted((SOURCE / "muonmesh").rglob("*.py")):
        tree = ast.parse(file.read_text())
        unpicklers += [file.name for _, _, full in imports("", tree, is_package=False) if full.startswith("pickle")]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                safe = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("weights_only") == "True"
                loads.append((file.relative_to(SOURCE / "muonmesh").as_posix(), safe))
    assert loads == [("tools/checkpoints/archive.py", True)]  # one place reads archives, and the core reads none
    # The class of an error; and the metadata that is written for torch, which the package never reads.
    assert set(unpicklers) == {"archive.py", "folder.py"}
    folder = ast.parse((SOURCE / "muonmesh/checkpoint/folder.py").read_text())
    used = {
        node.attr for node in ast.walk(folder) if isinstance(node, ast.Attribute) and dotted(node.value) == "pickle"
    }
    assert used == {"Pickler"}
