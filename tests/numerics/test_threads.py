"""Several user threads, each with its own number of torch threads, step optimizers at the same time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import muonmesh as mm
from muonmesh.comm import exchange
from muonmesh.numerics.kernels.threads import all_threads, alone, run_all, run_each, scratch, thread_count
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import RULES, MuonRule
from tests.support.tensors import random_step

COVERS = ("numerics.kernels.threads.run_all",)

CPU = torch.device("cpu")

pytestmark = pytest.mark.own_ambient


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_threads(*functions: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Run each function in a thread of its own, all starting together, and return what they return."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout) for future in [pool.submit(run, function) for function in functions]]


def trained_with_threads(seed: int, counts: Sequence[int]) -> list[Tensor]:
    """One step for each of the numbers of threads; the weights afterwards."""
    generator = torch.Generator().manual_seed(seed)
    weights = [nn.Parameter(torch.randn(24, 40, generator=generator)) for _ in range(7)]
    vector = nn.Parameter(torch.randn(40, generator=generator))
    groups = [{"params": weights, "name": "m"}, {"params": [vector], "algorithm": "adamw", "name": "v"}]
    optimizer = mm.Muon(groups, lr=0.1)
    for count in counts:
        torch.set_num_threads(count)
        for parameter in (*weights, vector):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in (*weights, vector)]


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(([2] * 60, [3] * 60), id="2 and 3", marks=pytest.mark.soak),
        pytest.param(([2, 3] * 30, [3, 2] * 30), id="each changes"),
        pytest.param(([2] * 60, [2] * 60), id="both 2", marks=pytest.mark.soak),
        pytest.param(([1, 2, 3, 4] * 15, [4, 2] * 30), id="many", marks=pytest.mark.soak),
    ],
)
def test_optimizers_in_two_threads_get_the_bits_of_one_after_the_other(plans: tuple[list[int], list[int]]) -> None:
    alone = [
        in_threads(lambda seed=seed, plan=plan: trained_with_threads(seed, plan))[0] for seed, plan in enumerate(plans)
    ]
    results = in_threads(
        *(lambda seed=seed, plan=plan: trained_with_threads(seed, plan) for seed, plan in enumerate(plans))
    )
    for expected, weights in zip(alone, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def test_memory_that_threads_give_up_is_kept_by_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer keeps views of the memory of its last step, though not the memory."""
    storages: list[StorageWeakRef] = []

    def recorded(*args: Any, **options: Any) -> Tensor:
        memory = scratch(*args, **options)
        storages.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(exchange, "scratch", recorded)
    small, large = (mm.Muon([nn.Parameter(torch.ones(size, size))], lr=0.1) for size in (24, 72))

    def steps() -> list[bool]:
        random_step(small, 0)
        first = len(storages)
        random_step(small, 1)
        random_step(large, 0)
        return [memory.expired() for memory in storages[:first]]

    assert in_threads(steps) == [[True, True]], "a larger matrix took other memory"
    assert all(memory.expired() for memory in storages), "the thread has ended"
    random_step(small, 2)
    assert not any(memory.expired() for memory in storages[-2:])


def test_batches_that_change_threads_have_the_bits_of_one_thread() -> None:
    # Each thread has memory of its own, so the views of a batch in the last step may be in another thread's memory.
    def trained_by(count: int) -> list[Tensor]:
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(8 + n, 40 - n, generator=generator)) for n in range(30)]
        optimizer = mm.Muon(weights, lr=0.1)
        for _ in range(12):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        return [weight.detach() for weight in weights]

    expected = trained_by(1)
    for count in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(expected, trained_by(count), strict=True))


def working(count: int) -> set[tuple[int, int]]:
    """The threads that work for a caller with `count` torch threads, and how many torch threads each of them has."""
    torch.set_num_threads(count)
    pairs: set[tuple[int, int]] = set()
    meet = threading.Barrier(count)

    def task() -> None:
        meet.wait(30)
        pairs.add((threading.get_ident(), torch.get_num_threads()))

    run_all([task] * count, device=CPU)
    return pairs


def test_each_number_of_threads_has_a_pool_that_callers_share() -> None:
    hold = threading.Barrier(3)

    def caller(count: int) -> set[tuple[int, int]]:
        pairs = set()
        for _ in range(count * 3):
            pairs |= working(count)
        hold.wait(30)  # as long as any of the callers lives its pool does
        return pairs

    two, three, four = in_threads(*(lambda count=count: caller(count) for count in (2, 3, 4)))
    assert [len(pairs) for pairs in (two, three, four)] == [2, 3, 4]
    assert {threads for pairs in (two, three, four) for _, threads in pairs} == {1}


def test_nobody_waits_for_a_thread_that_gets_no_core() -> None:
    """The only helper of two threads is busy with tasks of another caller, as one that is not scheduled would be."""
    release, busy = threading.Event(), threading.Barrier(3)

    def other() -> None:
        torch.set_num_threads(2)

        def task() -> None:
            busy.wait(30)
            assert release.wait(60)

        run_all([task] * 2, device=CPU)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        busy.wait(30)
        torch.set_num_threads(2)
        runners: list[int] = []
        run_all([lambda: runners.append(threading.get_ident())] * 20, device=CPU)
        run_each(lambda _: runners.append(threading.get_ident()), range(20))
        assert runners == [threading.get_ident()] * 40
        assert not release.is_set()
    finally:
        release.set()
        thread.join()


def test_an_operation_of_torch_has_one_thread_alone_and_all_together() -> None:
    torch.set_num_threads(3)
    started: list[int] = []
    with alone():
        assert (torch.get_num_threads(), thread_count()) == (1, 3)
        started += in_threads(torch.get_num_threads)  # threads that start meanwhile have all
        with all_threads():
            assert (torch.get_num_threads(), thread_count()) == (3, 3)
            with alone():
                assert (torch.get_num_threads(), thread_count()) == (1, 3)
        assert (torch.get_num_threads(), thread_count()) == (1, 3)
        run_each(lambda _: started.append(thread_count()), range(9))  # a task has the thread that runs it
    assert (torch.get_num_threads(), thread_count()) == (3, 3)
    assert started == [3] + [1] * 9


STEPS = """
import os, threading, torch, muonmesh as mm
from torch import nn

def threads():
    helpers = sum(thread.name.startswith("muonmesh") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")) - helpers

for shapes in ([(600, 700), (520, 520), (90, 90)], [(600, 700)]):
    for kernels in ("torch", "compiled"):
        torch.set_num_threads(1)
        weights = [nn.Parameter(torch.randn(*shape) * 0.02) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = mm.Muon(weights, kernels=kernels)
        torch.set_num_threads(3)
        before = threads()
        for _ in range(2):
            optimizer.step()
        print(threads() - before, torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_a_step_starts_no_thread_of_openmp(products: None) -> None:
    """Such threads spin after each operation, and take cores from those that have work.

    Three matrices or one, by the products of torch or by ours: for one matrix these start helpers of threads.c.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    run = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["0 3", "0 3", "0 3", "2 3"]


def test_a_pool_nobody_uses_ends_its_threads() -> None:
    def named() -> int:
        return sum(thread.name.startswith("muonmesh") for thread in threading.enumerate())

    torch.set_num_threads(5)
    working(5)
    assert named() >= 4  # the caller is the fifth
    before = named()
    working(2)
    gc.collect()
    until = time.monotonic() + 30
    while named() > before - 4 + 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert named() <= before - 4 + 1


def test_making_a_pool_leaves_the_numbers_of_others_alone() -> None:
    """torch hands the number set last, by any thread, to threads that start later."""
    torch.set_num_threads(3)
    set_by_other = in_threads(lambda: torch.set_num_threads(4))  # the last one set
    assert set_by_other == [None]
    run_all([lambda: None] * 6, device=CPU)  # makes the pool of 3
    assert torch.get_num_threads() == 3
    assert in_threads(torch.get_num_threads) == [4]


_AT_THE_END = """
import threading, time, torch
from muonmesh.numerics.kernels.threads import keep, run_all

class Slow:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

both = threading.Barrier(2)

def task():
    both.wait()
    if threading.current_thread() is not threading.main_thread():
        keep("slow", Slow)

torch.set_num_threads(2)
run_all([task, task], device=torch.device("cpu"))
"""


def test_a_process_ends_when_its_helpers_have_freed_their_memory() -> None:
    """A helper that frees tensors while the interpreter shuts down would abort the process."""
    run = subprocess.run([sys.executable, "-c", _AT_THE_END], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, ["freed"])


def test_an_error_in_one_thread_reaches_its_caller_alone() -> None:
    def failing() -> str:
        torch.set_num_threads(2)

        def task() -> None:
            raise ValueError("mine")

        for _ in range(50):
            with pytest.raises(ValueError, match="mine"):
                run_all([task] * 4, device=CPU)
        return "raised"

    def fine() -> int:
        torch.set_num_threads(3)
        runs: list[int] = []
        for _ in range(50):
            run_all([lambda: runs.append(1)] * 4, device=CPU)
        return len(runs)

    assert in_threads(failing, fine) == ["raised", 200]


def _four_tasks() -> int:
    runs: list[int] = []
    run_all([lambda: runs.append(1)] * 4, device=CPU)
    return len(runs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_makes_pools_of_its_own_even_if_one_was_being_made() -> None:
    working(2)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            working(3)
            working(2)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:  # nothing of torch's own: OpenMP does not survive a fork
                os._exit(0 if _four_tasks() == 4 else 1)
            until = time.monotonic() + 30
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
                time.sleep(0.01)
            if ended[0] == 0:
                os.kill(child, 9)
                os.waitpid(child, 0)
            assert ended[0] == child
            assert os.waitstatus_to_exitcode(ended[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_threads_that_share_an_orthogonalizer_have_memory_of_their_own() -> None:
    """Small bf16 matrices are multiplied in fp32 copies, which belong to the thread that made the products."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    shared = Orthogonalizer.of(
        *(16, 90), coefficients="quintic", steps=5, method="auto", dtype=torch.bfloat16, kernels="torch", device=device
    )
    batches = torch.randn(16, 40, 16, 90).bfloat16()
    alone = [shared(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            results = list(threads.map(shared, batches))
            assert all(map(torch.equal, results, alone))


@pytest.mark.parametrize("how", ["all", "each"])
def test_an_error_is_raised_when_no_task_runs_any_more(how: str) -> None:
    """The tasks of a step write weights: one that runs on would write into what the user loads meanwhile."""
    torch.set_num_threads(2)
    running = threading.Event()
    numbers: list[int] = []

    def task(number: int) -> None:
        if number == 0:
            assert running.wait(10)
            raise MemoryError("no memory")
        running.set()
        time.sleep(0.3)
        numbers.append(number)

    run: dict[str, Callable[[], None]] = {
        "all": lambda: run_all([lambda: task(0), lambda: task(1), *[lambda: task(2)] * 20], device=CPU),
        "each": lambda: run_each(task, range(2)),
    }
    with pytest.raises(MemoryError, match="no memory"):
        run[how]()
    after = list(numbers)
    assert 1 in after
    time.sleep(0.5)
    assert numbers == after


def test_no_helper_is_left_when_the_interpreter_ends() -> None:
    """A thread that wakes while the interpreter ends aborts the process."""
    script = """
import atexit, threading
def look():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("muonmesh")])
atexit.register(look)  # called after those that are registered later
import torch
from muonmesh.numerics.kernels.threads import run_each
for threads in (3, 12):
    torch.set_num_threads(threads)
    run_each(lambda number: None, range(20))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_a_step_that_is_interrupted_leaves_its_memory_to_late_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step of any optimizer takes other memory: receive buffers may still be written."""

    @dataclass(frozen=True)
    class Interrupted(MuonRule):
        def whole(self, update: Tensor, state: Any) -> Tensor:
            raise KeyboardInterrupt

    monkeypatch.setitem(RULES, "interrupted", Interrupted)
    before = scratch("test receive", (8,), dtype=torch.float32, device=CPU)
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.eye(8)
    with pytest.raises(KeyboardInterrupt):
        mm.Muon([{"params": [weight], "algorithm": "interrupted"}]).step()
    assert scratch("test receive", (8,), dtype=torch.float32, device=CPU).data_ptr() != before.data_ptr()
