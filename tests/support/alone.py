"""Alone: work in a process of its own, and in children of that one which end before they are done.

`alone` runs a function in a copy of a process that has imported torch and has no threads, so that it may fork. There,
`ended` forks once for each point at which a child is to end, or to be refused an operation on files.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tests.support.workers  # noqa: F401 - says what the process that is copied imports

DEAD = 77


def alone(function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """Return what `function(*args)` returns in a process of its own; module-level, and of values that pickle."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        assert receiver.poll(timeout), f"{function.__name__} was still running after {timeout} s"
        value, trace = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert not trace, trace
    return value


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = (function(*args), "")
    except BaseException:
        answer = (None, traceback.format_exc())
    connection.send(answer)


def in_child(work: Callable[[], Any]) -> int:
    """Run it in a child and return how that ended: 0, `DEAD`, minus a signal, or 1 after a traceback."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Point:
    """A point among the operations on files below a folder, counted from 0: before it, `act` is called once.

    Python tells its audit hooks of every file it opens, renames, makes, removes or lists, before it does.
    """

    def __init__(self, folder: Path, number: int, act: Callable[[], None]) -> None:
        self.below, self.remaining, self.act, self.armed = str(folder), number, act, True
        sys.addaudithook(self._hear)  # there is no taking it back, so this is for children

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed and (event == "open" or event.startswith(("os.", "shutil."))) and self._below(args):
            self.remaining -= 1
            if self.remaining < 0:
                self.armed = False
                self.act()

    def _below(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(arg, str | os.PathLike) and os.fspath(arg).startswith(self.below) for arg in args[:2])


def die() -> None:
    os._exit(DEAD)


def refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def files_of_at_most(size: int, *, deadly: bool) -> Iterator[None]:
    """The system ends whoever writes byte number `size` of a file, or refuses it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
