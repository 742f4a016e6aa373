"""Threads: each thread works on a task of its own, instead of all threads together on one operation at a time.

A CPU operation that torch spreads over threads ends at a barrier, at which OpenMP's threads spin for some milliseconds.
Where other programs use the cores, most of this spinning is for a thread that the scheduler has taken away, and it
takes a core from the threads that have work. Whole matrices are independent of each other, so torch's operations have
one thread each here (`alone`). The caller claims tasks like the threads of a pool: a thread that does not get a core
claims none, and nobody waits for it.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.profiler import record_function

T = TypeVar("T")

WAITING = "muonmesh: waiting for other threads"
"""The name in torch's profiler of what a caller waits for at the end of tasks."""

_SHARED = 0.8
"""Speed of all threads on one matrix after the other, relative to each on matrices of its own (measured)."""


def thread_count() -> int:
    """Return how many threads may work for this thread: torch's number, also inside of `alone`."""
    return getattr(_mine, "count", None) or torch.get_num_threads()


@contextmanager
def alone() -> Iterator[None]:
    """Have torch's operations on this thread run on this thread only, inside a block."""
    if torch.get_num_threads() == 1:
        yield
    else:
        with _counted(thread_count(), torch_has=1):
            yield


@contextmanager
def together() -> Iterator[None]:
    """Have torch's operations run on as many threads as outside of `alone`, inside a block; for few long operations."""
    count = thread_count()
    if torch.get_num_threads() == count:
        yield
    else:
        with _counted(count, torch_has=count):
            yield


@contextmanager
def _counted(count: int, *, torch_has: int) -> Iterator[None]:
    """Set what `thread_count` returns, and how many threads an operation of torch has, inside a block."""
    before, _mine.count = getattr(_mine, "count", None), count
    restore = _limit(torch_has)
    try:
        yield
    finally:
        _mine.count = before
        restore()


def run_all(
    tasks: Sequence[Callable[[], object]], *, device: torch.device, costs: Sequence[float] | None = None
) -> None:
    """Run independent tasks on as many threads as torch has, one thread each; the caller is one of them.

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
    threads = thread_count() if device.type == "cpu" else 1
    if threads == 1 or (len(tasks) == 1 and torch.get_num_threads() == 1):
        for task in tasks:
            task()
        return
    one_each = len(tasks) if len(tasks) > 1 else 0
    if one_each and costs is not None:
        one_each = _how_many_alone(costs, threads)
    if one_each:
        _share(tasks[:one_each], threads)
    with alone():
        for task in tasks[one_each:]:
            task()


def run_each(task: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Run ``task(number)`` for each number, one thread each; whichever of torch's threads here is free takes the next.

    Raises:
        Exception: the first one that a task raised.
    """
    _share([partial(task, number) for number in numbers], thread_count())


def run_on_one_thread(task: Callable[[], T], *, device: torch.device) -> T:
    """Return what a task gives whose bits depend on the number of threads that share one operation: on a CPU, on one.

    Args:
        task: May be called on a thread of `run_all`, which is alone already.
        device: What it computes on.

    Raises:
        Exception: what the task raised.
    """
    if device.type != "cpu":
        return task()
    with _counted(1, torch_has=1):
        return task()


def _how_many_alone(costs: Sequence[float], threads: int) -> int:
    """Return how many of the tasks should have one thread each; the rest, fewer than threads, follow on all."""

    def end(one_each: int) -> float:
        busy = [0.0] * threads
        for cost in costs[:one_each]:
            heapq.heapreplace(busy, busy[0] + cost)
        return max(busy) + sum(costs[one_each:]) / (_SHARED * threads)

    return min(range(len(costs), max(-1, len(costs) - threads), -1), key=end)


# ---------------------------------------------------------------- tasks that threads share


def _share(tasks: Sequence[Callable[[], object]], threads: int) -> None:
    """Run tasks on this thread and on others, ``threads`` in all, each of which claims one task after the other.

    It returns when no task runs any more, since it would still write. What a thread has not claimed is not waited for:
    the scheduler may have given it no core at all.

    Raises:
        BaseException: the first error of a task, or Ctrl-C. Tasks that have not begun then do not.
    """
    left, lock, errors = iter(tasks), threading.Lock(), list[BaseException]()

    def claimed() -> Callable[[], object] | None:
        with lock:
            return None if errors else next(left, None)

    def work() -> None:
        try:
            while (task := claimed()) is not None:
                task()
        except BaseException as error:
            errors.append(error)

    helping = list[Future[None]]()
    with suppress(RuntimeError):  # no thread starts where the interpreter ends; the caller needs none
        for _ in range(min(threads, len(tasks)) - 1):
            helping.append(_helpers(threads).submit(work))
    with _counted(1, torch_has=1), torch.no_grad():
        work()
    begun = [future for future in helping if not future.cancel()]
    profiled = begun and torch.autograd.profiler._is_profiler_enabled
    with record_function(WAITING) if profiled else nullcontext():
        wait(begun)
    if errors:
        error = errors[0]
        errors.clear()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


def _begin() -> None:
    """Prepare a thread of a pool."""
    torch.get_num_threads()  # torch sets the number of a thread at its first question
    _limit(1)
    torch.set_grad_enabled(False)


_pools: WeakValueDictionary[int, ThreadPoolExecutor] = WeakValueDictionary()
_lock = threading.Lock()
_mine = threading.local()


def _helpers(count: int) -> ThreadPoolExecutor:
    """Return the pool for callers with this number of threads; all of them share it.

    Each caller holds the pool that it used last. A pool that no caller holds any more ends its threads, which frees
    their memory. Others end before the interpreter does.
    """
    pool: ThreadPoolExecutor | None = getattr(_mine, "pool", None)
    if pool is None or _mine.key != (os.getpid(), count):
        _mine.pool = None
        with _lock:
            pool = _pools.get(count)
            if pool is None:
                pool = _pools[count] = ThreadPoolExecutor(count - 1, "muonmesh", _begin)
        _mine.pool, _mine.key = pool, (os.getpid(), count)
    return pool


def _forget() -> None:
    """Reset the pools in a forked process, which has only one thread; another thread may have held the lock."""
    global _lock, _pools
    _lock, _pools = threading.Lock(), WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# ---------------------------------------------------------------- how many threads an operation of torch has


class _Libraries(NamedTuple):
    """Functions that set how many threads an operation that this thread starts has.

    Attributes:
        openmp: OpenMP's, of the library that torch uses.
        mkl: MKL's, which returns the number before, 0 for OpenMP's number; None: torch has no MKL.
    """

    openmp: Callable[[int], Any]
    mkl: Callable[[int], int] | None


@cache
def _libraries() -> _Libraries | None:
    """Return the functions of the libraries that torch has loaded; None if they cannot be found.

    `torch.set_num_threads` sets OpenMP's and MKL's numbers of this thread, and also the number that threads take which
    start later, and those are not ours.
    """
    own = ctypes.CDLL(torch._C.__file__)
    mkl = getattr(own, "MKL_Set_Num_Threads_Local", None)
    if mkl is None and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    count = torch.get_num_threads()
    for library in (ctypes.CDLL(None), own):  # the first has a library that was preloaded, which goes before torch's
        openmp = getattr(library, "omp_set_num_threads", None)
        if openmp is not None:
            openmp(count + 1)
            taken = torch.get_num_threads()
            openmp(count)
            if taken == count + 1:
                return _Libraries(openmp, mkl)
    return None


def _limit(count: int) -> Callable[[], object]:
    """Set how many threads torch's operations on this thread have, and return a function that undoes it."""
    before, libraries = torch.get_num_threads(), _libraries()
    if libraries is None:
        torch.set_num_threads(count)
        return lambda: torch.set_num_threads(before)
    libraries.openmp(count)
    mkl = 0 if libraries.mkl is None else libraries.mkl(count)

    def restore() -> None:
        libraries.openmp(before)
        if libraries.mkl is not None:
            libraries.mkl(mkl)

    return restore
