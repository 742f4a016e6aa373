"""Every module of the package has a test that says so, and every helper of tests stands in one file.

``COVERS`` of a file of tests names what is tested there. So one search for a function's name leads to its test, also
where the test calls it through the optimizer.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "muonmesh"

# Entrances of a line or two, run by every test of what they enter.
ENTRANCES = {"__main__", "testing"}


def defined(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module or a class defines, methods as Class.method."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in defined(node.body)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def names_by_module() -> dict[str, set[str]]:
    """Return what each module defines; one that only re-exports, as many an ``__init__``, is left out."""
    by_module = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        names = defined(ast.parse(path.read_text()).body)
        if path.name != "__init__.py" or any(not name.startswith("_") for name in names):
            by_module[module.removesuffix(".__init__")] = names
    return {module: names for module, names in by_module.items() if module not in {"__init__"} | ENTRANCES}


def covered() -> dict[str, list[str]]:
    """Return what each file of tests says that it covers."""
    by_file = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS":
                by_file[path.relative_to(ROOT).as_posix()] = list(ast.literal_eval(node.value))
    return by_file


def test_every_module_has_a_test_that_covers_it() -> None:
    modules = names_by_module()
    names = {f"{module}.{name}": module for module, defined_names in modules.items() for name in defined_names}
    by_file = covered()
    unknown = {(file, name) for file, covers in by_file.items() for name in covers if name not in names}
    assert unknown == set(), "COVERS names what the package does not define: it was renamed, or is misspelt"
    without = set(modules) - {names[name] for covers in by_file.values() for name in covers}
    assert without == set(), 'write COVERS = ("module.function",) in the test that covers it'


def test_what_is_covered_is_named_once_in_a_file() -> None:
    for file, covers in covered().items():
        assert [name for name, count in Counter(covers).items() if count > 1] == [], file


def is_helper(node: ast.stmt) -> bool:
    """Whether a statement defines a function that is neither a test nor a fixture."""
    if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test_", "pytest_")):
        return False
    return not any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_a_helper_is_defined_in_one_file() -> None:
    """What several files need stands in tests/support; what only sounds alike has a name of its own."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = Counter(node.name for file in files for node in ast.parse(file.read_text()).body if is_helper(node))
    several = {name for name, count in names.items() if count > 1}
    assert several == set(), "define it in tests/support, or give each a name that says what it does"
