"""Deaths: ranks that are programs of their own and train, until one of them vanishes inside `step`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm
import muonmesh.optimizer
from muonmesh.comm.communicator import Communicator
from muonmesh.step.parameters import ReadyParameters
from tests.support.workers import join_default_group

Moment = Literal[
    "before the flags",
    "before the gather",
    "in AdamW's half",
    "before the scatter",
    "before passing on",
    "at the end",
    "before a bucket of gradients",
    "before the averages of AdamW's",
]
How = Literal["killed", "exited", "stopped"]
STEPS = 4
LAST_WHOLE = 2  # steps before the one in which a rank vanishes


@dataclass
class Told:
    """What a rank says that was left behind.

    Attributes:
        error: What `step` raised.
        seconds: For how long the rank had waited then.
        whole: Steps that it has finished.
        refused: What `state_dict` raised afterwards; empty where it returned.
        weights: By name, as the rank has them.
    """

    error: str
    seconds: float
    whole: int
    refused: str
    weights: dict[str, np.ndarray]


def make() -> nn.Module:
    """Three matrices, one for each rank to own, and vectors for AdamW."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def give(model: nn.Module, step: int, replica: int = 0, copies: int = 1) -> None:
    """Gradients that are a function of the step, by a backward pass; each is one replica's, times how many there are.

    Their mean is that gradient to the last bit where ``copies`` is a power of 2.
    """
    device = next(model.parameters()).device
    generator, loss = torch.Generator().manual_seed(step), torch.zeros((), device=device)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = None
        factor = float(copies) if number % copies == replica else 0.0
        loss = loss + (parameter * (torch.randn(parameter.shape, generator=generator) * factor).to(device)).sum()
    loss.backward()


def optimizer_of(model: nn.Module, **options: Any) -> mm.Muon:
    return mm.from_model(
        model, overrides={".*weight": "muon"}, lr=0.01, compute_dtype=torch.float32, ns_steps=2, **options
    )


def vanish(how: How) -> None:
    if how == "exited":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def vanish_at(moment: Moment, how: How) -> None:
    """Let this process vanish when it comes there."""

    def before(owner: Any, name: str, number: int = 1) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        calls = 0

        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                vanish(how)
            return original(*args, **kwargs)

        setattr(owner, name, act)

    places: dict[Moment, tuple[Any, str, int]] = {
        "before the flags": (Communicator, "agree", 1),
        "before the gather": (Communicator, "start", 1),
        "in AdamW's half": (muonmesh.optimizer, "step_elementwise", 1),
        "before the scatter": (Communicator, "start", 2),
        "before passing on": (
            Communicator,
            "swap",
            2,
        ),  # four replicas on two machines gather nothing, and scatter first
        "at the end": (ReadyParameters, "finish", 1),
        "before a bucket of gradients": (Communicator, "start", 1),  # in the backward pass
        "before the averages of AdamW's": (Communicator, "start", 3),
    }
    before(*places[moment])


def train(
    connection: Connection,
    rank: int,
    ranks: int,
    port: int,
    victim: int,
    moment: Moment,
    how: How,
    keeps: bool,
    machine: int,
    to_owners: bool,
    device: str,
) -> None:
    """What each rank does; ``keeps``: rank 0 keeps the store, as without torchrun."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(machine)
    store = dist.TCPStore("127.0.0.1", port, is_master=False) if not keeps else _kept_by_first(connection, rank)
    join_default_group(device, store, rank, ranks, timedelta(seconds=6))
    model = make().to(device)
    optimizer = optimizer_of(model, process_group="world", gradients="to_owners" if to_owners else None)
    whole, error, began = 0, "", time.monotonic()
    for step in range(STEPS):
        if step == LAST_WHOLE and rank == victim:
            vanish_at(moment, how)
        began = time.monotonic()
        try:
            give(model, step, rank, ranks) if to_owners else give(model, step)
            optimizer.step()
            optimizer.zero_grad()
        except mm.PlanError as found:
            error = str(found)
            break
        whole += 1
    if device == "cuda":
        torch.cuda.synchronize()  # a step returns before it has run; torch's watchdog ends a process that waits in vain
    seconds, refused = time.monotonic() - began, ""
    try:
        optimizer.state_dict()
    except mm.StateError as found:
        refused = str(found)
    weights = {name: tensor.detach().cpu().numpy() for name, tensor in model.named_parameters()}
    connection.send(Told(error, seconds, whole, refused, weights))
    connection.recv()  # until all have been heard
    os._exit(0)


def _kept_by_first(connection: Connection, rank: int) -> dist.TCPStore:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connection.send(store.port)
        return store
    return dist.TCPStore("127.0.0.1", connection.recv(), is_master=False)


def left_behind(
    moment: Moment,
    how: How,
    *,
    ranks: int = 3,
    victim: int = 1,
    keeps: bool = False,
    seconds: float = 60.0,
    machine: int = 0,
    to_owners: bool = False,
    device: str = "cpu",
) -> dict[int, Told]:
    """Let a rank vanish, and return what each of the others says; none may still be silent after that time.

    One that has ended without a word says so in its error: it has finished no step.
    """
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(ranks):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, rank, ranks, store.port, victim, moment, how, keeps, machine, to_owners, device)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            child_end.close()
            processes.append(process)
            connections.append(parent_end)
        if keeps:
            port = connections[0].recv()
            for connection in connections[1:]:
                connection.send(port)
        reports: dict[int, Told] = {}
        began = time.monotonic()
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank != victim}
        deadline = time.monotonic() + seconds
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=remaining):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    reports[rank] = ready.recv()
                except EOFError:
                    processes[rank].join()
                    reports[rank] = Told(f"ended with {processes[rank].exitcode}", time.monotonic() - began, 0, "", {})
        assert not waiting, f"still waiting after {seconds} s: {sorted(waiting.values())}"
        return reports
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()
