"""Pools of gloo ranks that live for a whole test session; tests hand them functions.

Starting Python and torch costs seconds a rank, so the ranks are started once for each world size, at its
first use, and then serve every test. They are real processes with a real `torch.distributed` default group
(gloo on the loopback device, one thread each). In a test::

    def largest(values: list[float]) -> float:           # at module level: it is pickled by name
        mine = torch.tensor(values[dist.get_rank()])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return mine.item()

    def test_largest(workers):
        assert workers(2).run(largest, [3.0, 5.0]) == [5.0, 5.0]    # one value a rank

Nothing can outlive its time limit: ranks still running at the limit are reported with the line on which
they hang and killed, and the next call starts fresh ones. After every call the ranks must still be in step
with each other, that is, have issued the same collectives on the default group.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor

from tests.support import pretended

pretended.install()

# What tests of models and of DeepSpeed import too: once, not once a rank.
MODELS = ("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral")
# Imported by an engine when it is made, and Inductor with it: four seconds a rank.
ENGINE = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
multiprocessing.set_forkserver_preload([__name__, "muonmesh.build", "muonmesh.integrations.qk_clip", *MODELS, *ENGINE])

START_SECONDS = 180.0  # importing torch on a busy machine
STEP_SECONDS = 10.0  # the collective that shows that the ranks are in step
GRACE_SECONDS = 5.0  # for the other ranks, once one has raised


class RankFailure(AssertionError):
    """A rank raised, died, hung or fell out of step; the message names the rank and shows its traceback."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of one call: its value, or the class, message and traceback of what it raised."""

    rank: int
    seconds: float
    value: Any = None
    error: type[BaseException] | None = None
    message: str = ""
    traceback: str = ""


class Pool:
    """`world_size` ranks that run functions together.

    A function is a module-level function of an importable module. It is called with the same arguments on
    every rank (`torch.distributed` knows which rank it is), with one thread and `torch.manual_seed(0)`.
    Arguments and values are pickled: tensors as copies, so return plain CPU tensors; a DTensor is refused,
    since its other shards are elsewhere (return `.to_local()` or `.full_tensor()`).

    Ranks are copies of one process that has imported torch and what takes long beside it. With ``programs`` each
    starts from nothing, as torchrun starts it, with a hash seed of its own: a few seconds of a core a rank.

    On the device "cuda" the ranks share the first GPU and talk over NCCL (`nccl_environment`); they need `programs`.
    """

    def __init__(self, world_size: int, *, programs: bool = False, device: str = "cpu") -> None:
        self.world_size = world_size
        self.programs = programs
        self.device = device
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: TCPStore | None = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the running ranks; empty while none run."""
        return [process.pid for process in self._processes]

    def most_threads(self) -> int:
        """The threads of the rank that has most; 0 where the system does not say."""
        tasks = [Path(f"/proc/{pid}/task") for pid in self.pids]
        return max((len(list(path.iterdir())) for path in tasks if path.exists()), default=0)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank and return the values in rank order.

        Raises:
            RankFailure: a rank raised, died, or is still running after `timeout` seconds (or five seconds
                after another one raised); or the ranks are out of step afterwards.
        """
        __tracebackhide__ = True
        outcomes = self._call(function, args, kwargs, timeout=timeout, grace=GRACE_SECONDS)
        in_step = self._in_step()
        self._raise_failures(outcomes)
        if not in_step:
            raise RankFailure(
                f"{_name(function)}: the ranks issued different collectives on the default group; needed the "
                "same on every rank"
            )
        return [outcome.value for outcome in outcomes]

    def run_expecting_errors(
        self, function: Callable[..., Any], *args: Any, timeout: float = 10.0, **kwargs: Any
    ) -> list[Outcome]:
        """Run `function(*args, **kwargs)` and return what each rank raised, or its value where it did not.

        Raises:
            RankFailure: a rank died, or is still running after `timeout` seconds.
        """
        __tracebackhide__ = True
        outcomes = self._call(function, args, kwargs, timeout=timeout, grace=timeout)
        self._in_step()
        return outcomes

    def close(self) -> None:
        """Kill the ranks; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._stacks is not None:
            self._stacks.cleanup()
        self._processes, self._connections, self._store, self._stacks = [], [], None, None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn" if self.programs else "forkserver")
        # Held by the caller, as torchrun does, so that it survives any rank; port 0 lets the system choose.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="muonmesh-ranks-")
        for rank in range(self.world_size):
            parent_end, child_end = context.Pipe()
            arguments = (rank, self.world_size, self._store.port, child_end, self._stack_file(rank), self.device)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            child_end.close()  # or the end of a rank would not be seen
            self._processes.append(process)
            self._connections.append(parent_end)
        self._collect("starting", timeout=START_SECONDS, grace=GRACE_SECONDS)

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float,
        grace: float,
    ) -> list[Outcome]:
        __tracebackhide__ = True
        # Not Connection.send: torch makes that pass tensors as shared memory, which dies with its owner.
        message = pickle.dumps((function, args, kwargs))
        if not all(process.is_alive() for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(_name(function), timeout=timeout, grace=grace)

    def _collect(self, task: str, *, timeout: float, grace: float) -> list[Outcome]:
        """Wait for an outcome from every rank; when one died or hung, kill them all and raise."""
        __tracebackhide__ = True
        begin = time.monotonic()
        deadline = begin + timeout
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        outcomes: list[Outcome] = []
        problems: list[str] = []
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=remaining):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    died = f"{self._title(rank)} died: exit code {self._processes[rank].exitcode}"
                    problems.append(f"{died}\n{Path(self._stack_file(rank)).read_text()}".rstrip())
                else:
                    outcomes.append(outcome)
                if problems or outcomes[-1].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in sorted(pending.values()):
            seconds = time.monotonic() - begin
            problems.append(f"{self._title(rank)} was still running after {seconds:.1f} s:\n{self._stack(rank)}")
        if problems:
            self.close()
            problems += [self._describe(outcome) for outcome in outcomes if outcome.error is not None]
            raise RankFailure("\n\n".join([task, *problems]))
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def _in_step(self) -> bool:
        """Whether every rank gets every rank's number from one more collective; if not, they are killed."""
        try:
            outcomes = self._call(_gather_ranks, (), {}, timeout=STEP_SECONDS, grace=0.0)
        except RankFailure:
            return False
        if all(outcome.value == list(range(self.world_size)) for outcome in outcomes):
            return True
        self.close()
        return False

    def _raise_failures(self, outcomes: list[Outcome]) -> None:
        __tracebackhide__ = True
        failures = [self._describe(outcome) for outcome in outcomes if outcome.error is not None]
        if failures:
            raise RankFailure("\n\n".join(failures))

    def _describe(self, outcome: Outcome) -> str:
        return f"{self._title(outcome.rank)} raised after {outcome.seconds:.1f} s:\n{outcome.traceback}"

    def _title(self, rank: int) -> str:
        return f"rank {rank} of {self.world_size}"

    def _stack_file(self, rank: int) -> str:
        assert self._stacks is not None
        return str(Path(self._stacks.name) / f"{rank}.txt")

    def _stack(self, rank: int) -> str:
        """Ask a hanging rank where it is."""
        pid = self._processes[rank].pid
        file = Path(self._stack_file(rank))
        if pid is None or not file.exists():  # it did not come as far as listening for the signal
            return ""
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while not file.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of what is being written
        return file.read_text()


class _Pickler(pickle.Pickler):
    """Refuses DTensors: one rank's shard would arrive looking like the whole."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise TypeError("a rank returned a DTensor: return its .to_local() or its .full_tensor()")
        return NotImplemented


def _dumps(outcome: Outcome) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(outcome)
    return buffer.getvalue()


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _gather_ranks() -> list[int]:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = [torch.full((1,), -1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()], device=device))
    return [int(rank) for rank in ranks]


def nccl_environment(rank: int) -> dict[str, str]:
    """What lets several ranks of NCCL share one GPU; before NCCL starts, so each rank is a process of its own.

    NCCL refuses two ranks of one host on one GPU, and takes the host's name from NCCL_HOSTID. So the ranks look like
    hosts, which talk over sockets on the loopback interface. They take turns on the multiprocessors, a waiting kernel
    too, hence the few channels. NVIDIA does not support this; it shows what is right and says nothing about speed.
    """
    return {
        **{"NCCL_HOSTID": f"muonmesh-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
        **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"},
        **{"NCCL_MAX_NCHANNELS": "2", "NCCL_MAX_CTAS": "2", "LOCAL_RANK": "0"},
        **{"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        **{"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
    }


class _OneDevice(dist.ProcessGroupGloo):
    """gloo as it is, but all groups of a rank share one device, and the collectives of a group share one thread.

    By itself each group has a device of its own, whose thread wakes up a hundred times a second even if the group is
    never used again: with a dozen groups a rank, a quarter of two cores [measured].

    And it has two threads for collectives, which write the name of what they have completed into one string without a
    lock (``ProcessGroupGloo::runLoop``, torch 2.13). Names of 16 letters and more, such as ALLGATHER_COALESCED, are on
    the heap, so that two collectives that end at once free one of them twice: Megatron-FSDP's prefetched gathers killed
    one run of twenty beside two busy processes [AddressSanitizer].
    """

    _device = None

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
    ) -> None:
        assert not enable_reconfigure  # an argument that torch has passed since 2.14
        if _OneDevice._device is None:
            _OneDevice._device = dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_OneDevice._device], 1, timeout
        super().__init__(store, rank, size, options)


def _serve(rank: int, world_size: int, port: int, connection: Connection, stack_file: str, device: str) -> None:
    """Run by a rank: join the default group, then answer each call with an Outcome until killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which kills its ranks
    gc.freeze()  # or every engine that DeepSpeed makes would look for cycles in all that is imported, for two seconds
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        faulthandler.enable(file=stacks)  # a rank that dies of a signal says where
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
        dist.distributed_c10d.ProcessGroupGloo = _OneDevice  # type: ignore[misc]
        store = TCPStore("127.0.0.1", port, is_master=False)
        join_default_group(device, store, rank, world_size, timedelta(minutes=5))
        install_importhook(get_config())  # an assert that fails on a rank shows its values, as in pytest's own process
        connection.send_bytes(_dumps(Outcome(rank, 0.0)))
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            connection.send_bytes(_answer(rank, message))


def join_default_group(device: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """gloo on a CPU, NCCL on the first GPU, bound to it as torch recommends."""
    if device == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        return
    os.environ |= nccl_environment(rank)
    torch.cuda.set_device(0)
    bound = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)


def _answer(rank: int, message: bytes) -> bytes:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin = time.perf_counter()
    try:
        function, args, kwargs = pickle.loads(message)
        value = function(*args, **kwargs)
        return _dumps(Outcome(rank, time.perf_counter() - begin, value))
    except BaseException as error:  # torch's CheckpointException is one, and a test may want to see it
        return _dumps(
            Outcome(
                rank,
                time.perf_counter() - begin,
                error=_importable(type(error)),
                message=str(error),
                traceback=traceback.format_exc(),
            )
        )


def _importable(error: type[BaseException]) -> type[BaseException]:
    """The nearest class among the bases that can be pickled; one defined inside a function cannot."""
    for base in error.__mro__:
        try:
            pickle.dumps(base)
        except (pickle.PicklingError, AttributeError):
            continue
        assert issubclass(base, BaseException)
        return base
    raise AssertionError("BaseException can be pickled")
