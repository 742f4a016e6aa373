"""A process that is the only rank of its group: NCCL on a GPU, gloo on a CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def one_rank(function: str, device: str) -> Any:
    """Run a function, named "module:function", with a device in a fresh process; return what it returns.

    Once for all tests, also if it fails: a device is lent for minutes, and so a traceback is printed at once too. The
    module is imported there, after what DeepSpeed and Megatron read from the environment has been set. All that the
    process has started ends with it.

    Raises:
        AssertionError: it raised or died, with its traceback, or has not returned in time.
    """
    returned, value = _ran(function, device)
    assert returned, value
    return value


@functools.cache
def _ran(function: str, device: str, seconds: float = 240.0) -> tuple[bool, Any]:
    """Whether a function returned, and what; or what went wrong."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, function, device))
    process.start()
    child_end.close()
    try:
        if not parent_end.poll(seconds):
            return False, f"{function} has not returned in {seconds:.0f} s"
        answer: tuple[bool, Any] = parent_end.recv()
        return answer
    except EOFError:
        process.join()
        return False, f"{function} died: exit code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.kill()
        process.join()
        parent_end.close()


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a function returns, or its traceback: the cases after it in the same process shall run too."""
    try:
        return function(*args, **kwargs)
    except Exception:
        traceback.print_exc()
        return traceback.format_exc()


def _serve(connection: Connection, function: str, device: str) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # port 0: the system chooses
    os.environ |= {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"NCCL_SOCKET_IFNAME": "lo"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
        **{"DS_ACCELERATOR": device, "DS_BUILD_OPS": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    }
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    module, _, name = function.partition(":")
    try:
        answer = True, getattr(importlib.import_module(module), name)(device)
    except BaseException:
        traceback.print_exc()
        answer = False, traceback.format_exc()
    connection.send(answer)
    signal.pause()  # until it is killed, with what it has started
