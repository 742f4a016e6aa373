"""Threads: each thread works on a task of its own, instead of all threads together on one operation at a time.

A CPU operation that is spread over threads ends at a barrier; hundreds of short ones a step wait for the slowest thread
each time, and where other programs use the cores too, for the scheduler. Whole matrices are independent of each other.
"""

from __future__ import annotations

import heapq
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

_SHARED = 0.8
"""Speed of all threads on one matrix after the other, relative to each on matrices of its own (measured)."""


def run_all(
    tasks: Sequence[Callable[[], object]], *, device: torch.device, costs: Sequence[float] | None = None
) -> None:
    """Run independent tasks on as many threads as torch has, one thread each.

    The bits of a task must not depend on the number of threads: elementwise operations, and `run_each`. On other
    devices than the CPU the tasks are issued one after the other.

    Args:
        tasks: The longest first.
        device: What they compute on.
        costs: The cost of each task, in any unit. If given, the last tasks run one after the other, each on all
            threads, if this ends sooner than leaving threads idle.

    Raises:
        Exception: the first error of a task.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    alone = len(tasks) if threads > 1 and len(tasks) > 1 else 0
    if alone and costs is not None:
        alone = _how_many_alone(costs, threads)
    if alone:
        _finish([_threads(threads).submit(_run, task) for task in tasks[:alone]])
    for task in tasks[alone:]:
        task()


def run_parts(part: Callable[[int, int], None]) -> None:
    """Run a task that divides itself, ``part(number, parts)``, on as many threads as torch has here.

    Raises:
        Exception: the first one that a part raised.
    """
    parts = torch.get_num_threads()
    if parts == 1:
        part(0, 1)
    else:
        _finish([_threads(parts).submit(part, number, parts) for number in range(parts)])


def run_each(task: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Run ``task(number)`` for each number, one thread each; whichever of torch's threads here is free takes the next.

    Raises:
        Exception: the first one that a task raised.
    """
    left = iter(numbers)

    def part(_: int, __: int) -> None:
        with torch.no_grad():
            for number in left:
                task(number)

    run_parts(part)


def run_on_one_thread(task: Callable[[], T], *, device: torch.device) -> T:
    """Return what a task gives whose bits depend on the number of threads that share one operation: on a CPU, on one.

    Args:
        task: May be called on a thread of `run_all`, which is alone already.
        device: What it computes on.

    Raises:
        Exception: what the task raised.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return task() if threads == 1 else _finish([_threads(threads).submit(_run, task)])[0]


def _finish(tasks: Sequence[Future[T]]) -> list[T]:
    """Return the results of tasks in a pool. An error is raised when no task runs any more, since it would still write.

    Raises:
        BaseException: the first error of a task, or Ctrl-C, which does not wait for tasks that have not begun.
    """
    try:
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        wait(tasks)


def _how_many_alone(costs: Sequence[float], threads: int) -> int:
    """Return how many of the tasks should have one thread each; the rest, fewer than threads, follow on all."""

    def end(alone: int) -> float:
        busy = [0.0] * threads
        for cost in costs[:alone]:
            heapq.heapreplace(busy, busy[0] + cost)
        return max(busy) + sum(costs[alone:]) / (_SHARED * threads)

    return min(range(len(costs), max(-1, len(costs) - threads), -1), key=end)


def _run(task: Callable[[], T]) -> T:
    with torch.no_grad():
        return task()


_pools: weakref.WeakValueDictionary[int, ThreadPoolExecutor] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_mine = threading.local()


def _threads(count: int) -> ThreadPoolExecutor:
    """Return the pool with this number of threads; all callers with the same number share it.

    Each caller holds the pool that it used last. A pool that no caller holds any more ends its threads, which frees
    their memory. A pool is never shut down while a caller uses it.
    """
    pool: ThreadPoolExecutor | None = getattr(_mine, "pool", None)
    if pool is None or _mine.key != (os.getpid(), count):
        _mine.pool = None
        with _lock:
            pool = _pools.get(count)
            if pool is None:
                pool = _pools[count] = _start(count)
        _mine.pool, _mine.key = pool, (os.getpid(), count)
    return pool


def _start(count: int) -> ThreadPoolExecutor:
    started = threading.Barrier(count + 1)
    others: list[int] = []

    def alone() -> None:
        # The number is kept per thread, but one that starts takes the number that any thread has set last, at its first
        # question. So the first to ask learns what that was.
        others.append(torch.get_num_threads())
        torch.set_num_threads(1)
        torch.get_num_threads()
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="muonmesh")
    for _ in range(count):
        pool.submit(alone)  # each waits for the others, so each runs on a thread of its own
    started.wait()
    restore = threading.Thread(target=lambda: torch.set_num_threads(others[0]))
    restore.start()
    restore.join()
    return pool


def _forget() -> None:
    """Reset the pools in a forked process, which has only one thread; another thread may have held the lock."""
    global _lock, _pools
    _lock, _pools = threading.Lock(), weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
