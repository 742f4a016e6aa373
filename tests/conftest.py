"""What every test shares: one thread, the ranks, and no test for a GPU unless it is asked for."""

from __future__ import annotations

import ast
import os
import shutil

# Before torch is imported, here and in the ranks: layouts are compared bit for bit, and the number of threads
# changes how a matrix product rounds.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.support import pretended

if pretended.VARIABLE in os.environ:
    os.environ.update(pretended.environment(os.environ[pretended.VARIABLE]))
    pretended.install()

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ambient
from tests.support.workers import Pool

torch.set_num_threads(1)
ambient.install()

_pools: dict[int, Pool] = {}

# Folders whose tests set ambient state themselves: simulated and real devices, frameworks, and whole programs.
OWN_AMBIENT = ("device", "gpu", "hosts", "hosts_all", "megatron", "megatron_lm", "nemo_rl", "package", "train")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses ranks, and deselect the tests marked gpu or soak unless `-m` names them.

    Skipped, those would look like tested.
    """
    for item in items:
        if "workers" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
    left_out = [mark for mark in ("gpu", "soak") if mark not in config.getoption("markexpr")]
    chosen = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under pytest-xdist the files whose tests use ranks share one process, but for files where few of the tests do.

    Two pools at work together only slow each other down; files with few such tests are the exception because the two
    processes would else be busy for unequal times. The tests of another file stay together too, and so do the fixtures
    that they share. (`--dist loadgroup` would say it with marks, but pytest-xdist 3.8 cannot tell pytest 9.2's tests
    by their marks.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid.partition("::")[0])

    @cache
    def scope(file: str) -> str:
        share = share_with_ranks((config.rootpath / file).read_text())
        return "ranks" if share > 0.3 else "few ranks" if share else file

    return ByFile(config, log)


def share_with_ranks(source: str) -> float:
    """Return the share of a file's tests that use the fixture `workers`, themselves or through fixtures of the file."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    arguments = {function.name: {argument.arg for argument in function.args.args} for function in functions}
    for function in functions:
        arguments[function.name] |= {"workers" for line in function.decorator_list if "on_ranks" in ast.unparse(line)}
    using = {"workers"}
    while further := {name for name, names in arguments.items() if names & using} - using:
        using |= further
    tests = [name for name in arguments if name.startswith("test_")]
    return sum(name in using for name in tests) / max(len(tests), 1)


@pytest.fixture(scope="session")
def products() -> None:
    """For tests of the products in C; skips them where the package could not be built with them."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("this machine has no C compiler")


@pytest.fixture(scope="session")
def emulated_amx(products: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library whose variant amx has emulated tiles; skips tests where the processor has no AVX-512."""
    from tests.support import emulated

    if not emulated.emulates():
        pytest.skip("the variant amx needs AVX-512 beside its tiles")
    folder = tmp_path_factory.mktemp("emulated")
    emulated.build_library(folder)
    return folder


@pytest.fixture(autouse=True)
def hostile_ambient(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test of one process meets the package with another ambient state; AMBIENT=number draws others.

    Not the tests that set such state themselves, which are marked `own_ambient` or lie in `OWN_AMBIENT`, and those that
    use ranks.
    """
    node = request.node
    folder, *_ = node.path.relative_to(Path(__file__).parent).parts
    of_one_process = folder not in OWN_AMBIENT and "workers" not in request.fixturenames
    seed = os.environ.get("AMBIENT", "0")
    drawn = ambient.Ambient.drawn(f"{seed} {node.nodeid}")
    with ambient.around_entries(drawn if of_one_process and not node.get_closest_marker("own_ambient") else None):
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Pool]]:
    """`workers(n)` is the session's pool of n gloo ranks; they start when it first runs something."""

    def pool(world_size: int) -> Pool:
        if world_size not in _pools:
            _pools[world_size] = Pool(world_size)
        return _pools[world_size]

    yield pool
    for started_pool in _pools.values():
        started_pool.close()


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    """End ranks that have made hundreds of groups: gloo's threads wake up all the time, and all that follows waits."""
    yield
    for pool in _pools.values():
        if pool.most_threads() > 150:
            pool.close()
