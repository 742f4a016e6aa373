"""Processes that take trainings one at a time from the process that started them, and a deadline for all of them."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Train = Callable[[Any], dict[str, Any]]


@dataclass
class Worker:
    """One process, and what it does now."""

    process: BaseProcess
    pipe: Connection
    job: Any = None
    is_ready: bool = False


class Crew:
    """Worker processes, each new (spawn), so that each has a CUDA context of its own.

    Args:
        count: How many.
        prepare: Called once in each process; returns what trains. Of a module, so that a new process finds it.
        settings: Its argument, plain data.
        spare: How many are started again, all together, after a training raised an error or a process died: a CUDA
            context may be broken after an error.
    """

    def __init__(self, count: int, prepare: Callable[[Any], Train], settings: Any, *, spare: int = 4) -> None:
        self.prepare, self.settings, self.spare = prepare, settings, spare
        self.workers = [self._started() for _ in range(count)]

    def idle(self) -> list[Worker]:
        """Return who waits for a training."""
        return [worker for worker in self.workers if worker.is_ready and worker.job is None]

    def running(self) -> list[Any]:
        """Return what is being trained."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def gather(self, timeout: float) -> None:
        """Wait until all workers are ready, or so many seconds."""
        until = time.monotonic() + timeout
        while any(not worker.is_ready for worker in self.workers) and time.monotonic() < until:
            for _ in self.finished(1.0):
                pass

    def give(self, worker: Worker, job: Any) -> None:
        """Let a worker begin a training."""
        worker.job = job
        worker.pipe.send(job)

    def finished(self, timeout: float) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Wait until something happens, and yield what was finished, or failed: the job, and what its training said."""
        by_pipe = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(by_pipe), timeout):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                answer = {"error": "the process ended"}
            job, worker.job = worker.job, None
            if answer == "ready":
                worker.is_ready = True
                continue
            if "error" in answer:
                self._replace(worker)
            if job is not None:
                yield job, answer
            else:
                print(f"a worker could not begin: {answer['error']}", flush=True)

    def end(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
        self.workers = []

    def _replace(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.process.terminate()
        if self.spare > 0:
            self.spare -= 1
            self.workers.append(self._started())

    def _started(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        pipe, worker_end = context.Pipe()
        process = context.Process(target=_work, args=(worker_end, self.prepare, self.settings), daemon=True)
        process.start()
        worker_end.close()
        return Worker(process, pipe)


def _work(pipe: Connection, prepare: Callable[[Any], Train], settings: Any) -> None:
    """Be a worker."""
    try:
        train = prepare(settings)
        pipe.send("ready")
        while True:
            pipe.send(train(pipe.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"[:500]})
