"""Threads: each thread works on a task of its own, instead of all threads together on one operation at a time.

A CPU operation that torch spreads over threads ends at a barrier, at which OpenMP's threads spin for some milliseconds.
Where other programs use the cores, most of this spinning is for a thread that the scheduler has taken away, and it
takes a core from the threads that have work. Whole matrices are independent of each other, so torch's operations have
one thread each here (`alone`). The caller claims tasks like the threads of a pool: a thread that does not get a core
claims none, and nobody waits for it.

The package also ignores modes that the user has set for the model on the caller's thread, such as autocast
(`plain_modes`). Each thread keeps what it needs in every step (`keep`), such as `scratch` memory, since the system
would take long to provide this memory anew.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ContextDecorator, ExitStack, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.profiler import record_function

T = TypeVar("T")

WAITING = "muonmesh: waiting for other threads"
"""The name in torch's profiler of what a caller waits for at the end of tasks."""

_SHARED = 0.8
"""Speed of all threads on one matrix after the other, relative to each on matrices of its own (measured)."""

_VIEWS = 512
"""Number of shapes whose views are kept for each role of `scratch`."""


def thread_count() -> int:
    """Return how many threads may work for this thread: torch's number, also inside of `alone`."""
    return _thread_local.count or torch.get_num_threads()


class _Threads(ContextDecorator):
    """Set how many threads an operation of torch on this thread has, and what `thread_count` returns, inside a block.

    Args:
        of_torch: The threads of an operation; None: `thread_count`.
        count: What `thread_count` returns; None: what it returned before.
    """

    def __init__(self, of_torch: int | None, *, count: int | None = None) -> None:
        self._of_torch, self._count = of_torch, count
        self._restore: Callable[[], object] | None = None

    def _recreate_cm(self) -> _Threads:  # a decorated function may run on several threads at a time
        return _Threads(self._of_torch, count=self._count)

    def __enter__(self) -> None:
        of_torch = self._of_torch or thread_count()
        if self._count is None and torch.get_num_threads() == of_torch:
            return
        self._before, _thread_local.count = _thread_local.count, self._count or thread_count()
        self._restore = _limit(of_torch)

    def __exit__(self, *_: object) -> None:
        if self._restore is not None:
            _thread_local.count = self._before
            self._restore()


alone = partial(_Threads, 1)
"""Have torch's operations on this thread run on this thread only, inside a block."""

all_threads = partial(_Threads, None)
"""Have torch's operations run on as many threads as outside of `alone`, inside a block; for few long operations."""


class plain_modes(ContextDecorator):
    """Switch off the caller's autocast, inference mode and gradients inside a block; also a decorator.

    Autocast would multiply in a dtype other than the code's, and only on the thread that has entered it. Tensors made
    in inference mode could not be written outside of it.
    """

    _off: ExitStack | None = None

    def _recreate_cm(self) -> plain_modes:  # a decorated function may run on several threads at a time
        return plain_modes()

    def __enter__(self) -> None:
        autocast, inference = [*filter(torch.is_autocast_enabled, _kinds())], torch.is_inference_mode_enabled()
        if autocast or inference:  # seldom, and each context costs a small step
            self._off = ExitStack()
            if inference:
                self._off.enter_context(torch.inference_mode(False))  # which turns gradients on
            for kind in autocast:
                self._off.enter_context(torch.autocast(kind, enabled=False))
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._off is not None:
            self._off.__exit__(*error)


@cache
def _kinds() -> tuple[str, ...]:
    """Return the kinds of devices that autocast may be on for."""
    current = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys(("cpu", "cuda", "cpu" if current is None else current.type)))


def run_all(
    tasks: Sequence[Callable[[], object]], *, device: torch.device, costs: Sequence[float] | None = None
) -> None:
    """Run independent tasks on as many threads as torch has, one thread each; the caller is one of them.

    A task must give the same bits on any number of threads. Elementwise operations do, and so do products that
    `run_each` shares out. If the device is not the CPU, the caller runs the tasks one after the other.

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
    """Run a task whose bits depend on the number of threads, on one thread on a CPU, and return its result.

    Args:
        task: The task. You may call this function inside of a task of `run_all` too.
        device: The device that the task computes on.

    Raises:
        Exception: what the task raised.
    """
    if device.type != "cpu":
        return task()
    with _Threads(1, count=1):
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

    Returns when no task is running any more, because a running task may still write. It does not wait for a thread that
    has claimed no task: the scheduler may have given this thread no core at all.

    Raises:
        BaseException: the first error of a task, or Ctrl-C. Then the tasks that have not begun do not run.
    """
    unclaimed, lock, errors = iter(tasks), threading.Lock(), list[BaseException]()

    def claimed() -> Callable[[], object] | None:
        with lock:
            return None if errors else next(unclaimed, None)

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
    with _Threads(1, count=1), torch.no_grad():
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


class _ThreadLocal(threading.local):
    """What each thread keeps.

    Attributes:
        count: What `thread_count` returns; None: torch's number.
        pool, key: The pool that the thread used last, with the process and the number of threads; see `_helpers`.
        objects: What `keep` holds.
        scratch: The memory of `scratch`, by role and dtype, and its views by shape; None: all of it.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self.pool: ThreadPoolExecutor | None = None
        self.key: tuple[int, int] | None = None
        self.objects: dict[Hashable, object] = {}
        self.scratch: dict[tuple[str, torch.dtype], dict[Sequence[int] | None, Tensor]] = {}


_pools: WeakValueDictionary[int, ThreadPoolExecutor] = WeakValueDictionary()
_lock = threading.Lock()
_thread_local = _ThreadLocal()


def _helpers(count: int) -> ThreadPoolExecutor:
    """Return the pool for callers with this number of threads; all of them share it.

    Each caller holds the pool that it used last. A pool that no caller holds any more ends its threads, which frees
    their memory. Others end before the interpreter does.
    """
    pool = _thread_local.pool
    if pool is None or _thread_local.key != (os.getpid(), count):
        _thread_local.pool = None
        with _lock:
            pool = _pools.get(count)
            if pool is None:
                pool = _pools[count] = ThreadPoolExecutor(count - 1, "muonmesh", _begin)
        _thread_local.pool, _thread_local.key = pool, (os.getpid(), count)
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
    torch_library = ctypes.CDLL(torch._C.__file__)
    mkl = getattr(torch_library, "MKL_Set_Num_Threads_Local", None)
    if mkl is None and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    count = torch.get_num_threads()
    for library in (
        ctypes.CDLL(None),
        torch_library,
    ):  # the first has a library that was preloaded, which goes before torch's
        openmp = getattr(library, "omp_set_num_threads", None)
        if openmp is not None:
            openmp(count + 1)
            effective = torch.get_num_threads()
            openmp(count)
            if effective == count + 1:
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


# ---------------------------------------------------------------- what a thread keeps between steps


def keep(key: Hashable, make: Callable[[], T]) -> T:
    """Return the object that ``make`` returned for this key in this thread; ``make`` runs at the first call only."""
    objects = _thread_local.objects
    if key not in objects:
        objects[key] = make()
    return cast(T, objects[key])


def forget() -> None:
    """Drop all objects that `keep` holds for this thread."""
    _thread_local.objects = {}


def abandon_scratch() -> None:
    """Make `scratch` take new memory in this thread: messages of an interrupted step may still arrive in the old."""
    _thread_local.scratch = {}


def scratch(role: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory of this thread, which the thread's next call for the same role reuses.

    On a CPU, memory that is given back and taken again at every step costs a page fault per 4 KiB, 5 to 8 % of a step
    (measured). What is kept is the largest that each role has needed. Elsewhere torch's allocator does this.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    shape = shape if isinstance(shape, tuple) else tuple(shape)
    views_by_role = _thread_local.scratch
    views = views_by_role.get((role, dtype))
    if views is not None and (view := views.get(shape)) is not None:
        return view
    numel = math.prod(shape)
    memory = None if views is None else views[None]
    if memory is None or memory.numel() < numel or views is None or len(views) > _VIEWS:
        views_by_role.pop((role, dtype), None)
        if memory is None or memory.numel() < numel:
            del memory, views  # first, so that both are never there at once
            memory = torch.empty(numel, dtype=dtype, device=device)
        views = views_by_role[role, dtype] = {None: memory}
    view = views[shape] = memory[:numel].view(shape)
    return view
