"""What of a step's communication hides under its computing, on gloo ranks of one thread each.

    python -m benchmarks.studies.overlap --json benchmarks/results/overlap.json
    python -m benchmarks.studies.overlap --only bound --ranks 2 --megabits 150 --rounds 9
    python -m benchmarks.studies.overlap --only gradients --ranks 2 4 --json benchmarks/results/to_owners.json
    python -m benchmarks.studies.overlap --only trace --ranks 2 --megabits 60 --trace docs/images/draw/timeline.json

Each rank has a network namespace of its own, with links of a given bandwidth (`bandwidth.py`; needs root): on the
loopback device transfers are copied by the cores that should compute meanwhile. ``--megabits 0`` takes it all
the same. The model is an embedding, which is AdamW's, and blocks of two linear layers, which are Muon's, under FSDP2
or DDP.

``bound``: four things take turns, each timed from a barrier to the end of the slowest rank. A *step*; *computing*, the
same step but that nothing travels (the owners orthogonalize what arrived the last time); *communicating*, the
exchange's own collectives in their order with no work in between; AdamW's part, timed inside *computing*. Reported is
(step − AdamW) over max(computing − AdamW, communicating): the median over the rounds. Where every core computes, the
processor time that a transfer takes is taken from computing, so it is told beside, and so is the ratio to
max(computing − AdamW + that time, communicating).

``gradients``: backward and step under DDP, timed together: torch's AdamW, Muon, and Muon with
``gradients="to_owners"`` take turns. Reported is the median over the rounds of each one's time over AdamW's.

``trace``: one step under torch.profiler. The spans of its transfers, each of which a thread waits for, and of the
exchange's parts are kept for `docs/images/draw/timeline.py`, and how much of each gather lies under the
orthogonalization of the bucket before.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.contenders import Entries
from benchmarks.report import print_rows, quartiles, write_json
from benchmarks.studies.bandwidth import hosts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import muonmesh as mm
import muonmesh.optimizer
from muonmesh.comm.communicator import AllToAll, Communicator, PendingCollective
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.step_callbacks import StepCallbacks

WIDTH, HIDDEN = 256, 1024
KINDS = ("fsdp", "ddp")
PARTS = ("bound", "trace", "gradients")
WARM_UP = 3

Found = dict[str, Any]


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, WIDTH) to the same."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Model(nn.Module):
    """An embedding and blocks."""

    def __init__(self, vocabulary: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (tokens,) to (tokens, WIDTH)."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Rank:
    """One rank with its model and its optimizer; every rank calls everything."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        torch.manual_seed(0)
        model = Model(options.vocabulary, options.blocks)
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            self.wrapper = DistributedDataParallel(model)  # or its hooks are gone
        group = "world" if kind == "ddp" else None
        settings: dict[str, Any] = {"compute_dtype": getattr(torch, options.dtype)}
        settings["memory_budget_mb"] = 16 * options.bucket_mb
        self.optimizer = mm.from_model(model, process_group=group, **settings)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.normal_(std=1e-3)

    @property
    def exchange(self) -> Exchange:
        """The optimizer's, once it has stepped."""
        connected = self.optimizer._runtime.connected
        assert connected is not None
        return connected.exchange

    def buckets(self) -> int:
        """How many of them travel."""
        return len(self.exchange.schedule.stages)


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of the slowest rank, from a barrier to the end of its call."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    return slowest((time.perf_counter() - begin) * 1e3)


def slowest(milliseconds: float) -> float:
    """The largest of all ranks' numbers."""
    number = torch.tensor(milliseconds, dtype=torch.float64)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


# ------------------------------------------------------------------ bound


@contextmanager
def nothing_travels() -> Iterator[None]:
    """Let transfers be over when they begin; what has arrived is what arrived before."""
    all_to_all = Communicator.start

    def over(communicator: Communicator, moved: AllToAll) -> PendingCollective:
        return PendingCollective(moved.name, (), [])

    Communicator.start = over  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.start = all_to_all  # type: ignore[method-assign]


def communicate(exchange: Exchange) -> None:
    """Take part in the collectives of a step, with nothing to compute in between."""
    exchange.run(StepCallbacks())


def bound(rank: Rank, rounds: int) -> Found:
    """The step beside its parts."""
    adamw: list[float] = []
    step_elementwise = muonmesh.optimizer.step_elementwise

    def timed_adamw(*arguments: Any) -> None:
        begin = time.perf_counter()
        step_elementwise(*arguments)
        adamw.append((time.perf_counter() - begin) * 1e3)

    muonmesh.optimizer.step_elementwise = timed_adamw  # type: ignore[attr-defined]
    times: dict[str, list[float]] = {name: [] for name in ("step", "computing", "communicating", "adamw", "transport")}
    for number in range(WARM_UP + rounds):
        step = timed(rank.optimizer.step)
        counts = rank.optimizer.counts
        with nothing_travels():
            computing = timed(rank.optimizer.step)
        part = slowest(adamw[-1])
        busy = time.process_time()
        communicating = timed(lambda: communicate(rank.exchange))
        transport = slowest((time.process_time() - busy) * 1e3)
        if number >= WARM_UP:
            for name, value in zip(times, (step, computing, communicating, part, transport), strict=True):
                times[name].append(value)
    muonmesh.optimizer.step_elementwise = step_elementwise  # type: ignore[attr-defined]
    rows = list(zip(*times.values(), strict=True))
    ratios = [(step - part) / max(computing - part, moving) for step, computing, moving, part, _ in rows]
    beside = [(step - part) / max(computing - part + busy, moving) for step, computing, moving, part, busy in rows]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ratio_with_transport": statistics.median(beside),
        **{name: statistics.median(values) for name, values in times.items()},
        "rounds": times,
        "buckets": rank.buckets(),
        "megabytes_sent": counts.bytes_sent / 1e6,
    }


# ------------------------------------------------------------------ gradients


def gradients(options: argparse.Namespace) -> Found:
    """Backward and step of three optimizers in turns, in milliseconds."""
    tokens = torch.randint(0, options.vocabulary, (64,), generator=torch.Generator().manual_seed(dist.get_rank()))
    shared: dict[str, Any] = {
        "memory_budget_mb": 16 * options.bucket_mb,
        "compute_dtype": getattr(torch, options.dtype),
    }
    makes: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3),
        "muon": lambda net: mm.from_model(net, **shared),
        "to_owners": lambda net: mm.from_model(net, gradients="to_owners", **shared),
    }
    runs = {}
    for name, make in makes.items():
        torch.manual_seed(0)
        net = DistributedDataParallel(Model(options.vocabulary, options.blocks))
        runs[name] = net, make(net)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + options.rounds):
        for name, (net, optimizer) in runs.items():
            loss = net(tokens).square().mean()

            def learn(loss: Tensor = loss, optimizer: torch.optim.Optimizer = optimizer) -> None:
                loss.backward()
                optimizer.step()

            took = timed(learn)
            optimizer.zero_grad()
            if number >= WARM_UP:
                times[name].append(took)
    ratios = {f"{n} over adamw": [a / b for a, b in zip(times[n], times["adamw"], strict=True)] for n in times}
    return {"rounds": times, **{name: statistics.median(values) for name, values in (times | ratios).items()}}


# ------------------------------------------------------------------ trace

NAMES = {
    "_gather": "2 momentum",
    "_compute": "4 orthogonalize",
    "_scatter": "5 scatter",
    "_receive": "6 update",
}
"""What the exchange calls its parts, each with the number of its bucket, and what the picture does."""


class Moving(threading.Thread):
    """Waits for a transfer, to see when it is over."""

    def __init__(self, transfer: PendingCollective) -> None:
        super().__init__()
        self.phase, self.begin, self.end = transfer.name, time.time(), 0.0
        self.works, transfer.works = transfer.works, []
        self.start()

    def run(self) -> None:
        """Wait for all messages; nobody else does."""
        for work in self.works:
            work.wait()
        self.end = time.time()


@contextmanager
def named_parts(moving: list[Moving]) -> Iterator[None]:
    """Let the exchange's parts, and what is computed in them, have names in torch's profile; collect its transfers."""
    under_way: dict[int, Moving] = {}
    before = {name: getattr(Exchange, name) for name in NAMES}
    all_to_all, finish, adamw = Communicator.start, Communicator.finish, muonmesh.optimizer.step_elementwise

    def named(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(exchange: Exchange, bucket: Any, *arguments: Any) -> Any:
            stage = getattr(bucket, "stage", bucket)  # None before the first
            with record_function(f"muonmesh|{NAMES[name]}|{'' if stage is None else stage.number}"):
                return part(exchange, bucket, *arguments)

        return call

    def named_swap(communicator: Communicator, moved: AllToAll) -> PendingCollective:
        transfer = all_to_all(communicator, moved)
        under_way[id(transfer)] = Moving(transfer)
        return transfer

    def named_finish(communicator: Communicator, transfer: PendingCollective | None) -> None:
        if transfer is None:
            return
        with record_function(f"muonmesh|waits|{transfer.name}"):
            moving.append(under_way.pop(id(transfer)))
            moving[-1].join()
            finish(communicator, transfer)

    def named_adamw(*arguments: Any) -> None:
        with record_function("muonmesh|AdamW|"):
            adamw(*arguments)

    for name, part in before.items():
        setattr(Exchange, name, named(name, part))
    Communicator.start, Communicator.finish = named_swap, named_finish  # type: ignore[method-assign]
    muonmesh.optimizer.step_elementwise = named_adamw  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, part in before.items():
            setattr(Exchange, name, part)
        Communicator.start, Communicator.finish = all_to_all, finish  # type: ignore[method-assign]
        muonmesh.optimizer.step_elementwise = adamw  # type: ignore[attr-defined]


def traced(rank: Rank, rounds: int) -> Found:
    """Spans of the fastest of several steps, as torch's profiler has them, in seconds since 1970."""
    steps = []
    moving: list[Moving] = []
    with named_parts(moving):
        for _ in range(WARM_UP + rounds):
            moving.clear()
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("muonmesh|step|"):
                rank.optimizer.step()
            took = slowest(sum(e.duration_ns() for e in events(profiler) if e.name() == "muonmesh|step|") / 1e6)
            steps.append((took, profiler, tuple(moving)))
    _, profiler, moved = min(steps[WARM_UP:], key=lambda step: step[0])
    return {"spans": spans_of(profiler, moved)}


def events(profiler: Any) -> list[Any]:
    """The events of a profile, by their beginning."""
    return sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())


def spans_of(profiler: Any, moved: Sequence[Moving]) -> list[Found]:
    """Spans of the host, and of the transfers."""
    spans = []
    for event in events(profiler):
        if event.name().startswith("muonmesh|"):
            begin, end = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
            _, stage, about = event.name().split("|")
            spans.append({"lane": "host", "stage": stage, "bucket": bucket_in(about), "begin": begin, "end": end})
    for moving in moved:
        stage = "3 gather" if "gather" in moving.phase else "5 scatter"
        span = {"lane": "wire", "stage": stage, "bucket": bucket_in(moving.phase)}
        spans.append({**span, "begin": moving.begin, "end": moving.end})
    return without_waits(spans)


def bucket_in(text: str) -> int | None:
    """The first number in a name."""
    return next((int(word) for word in text.replace(",", " ").split() if word.isdigit()), None)


def without_waits(spans: list[Found]) -> list[Found]:
    """The same spans without those of the whole step and of waiting, which is cut out of what the host does."""
    waits = [span for span in spans if span["stage"] == "waits"]
    rest = []
    for span in spans:
        if span["stage"] in ("step", "waits"):
            continue
        begin = span["begin"]
        for wait in waits if span["lane"] == "host" else ():
            if begin <= wait["begin"] and wait["end"] <= span["end"]:
                rest.append({**span, "begin": begin, "end": wait["begin"]})
                begin = wait["end"]
        rest.append({**span, "begin": begin})
    return rest


def hidden(spans: list[Found]) -> list[float]:
    """For each bucket but the first, the part of its gather that lies under the computing of the bucket before."""
    gathers = {s["bucket"]: s for s in spans if s["stage"] == "3 gather"}
    computes = {s["bucket"]: s for s in spans if s["stage"] == "4 orthogonalize"}  # the last part, after waiting
    shares = []
    for bucket, gather in sorted(gathers.items()):
        if bucket:
            over = computes[bucket - 1]
            under = min(gather["end"], over["end"]) - max(gather["begin"], over["begin"])
            shares.append(max(0.0, under) / (gather["end"] - gather["begin"]))
    return shares


# ------------------------------------------------------------------ ranks

MEASURE: dict[str, Callable[[Rank, int], Found]] = {"bound": bound, "trace": traced}


def serve(folder: Path) -> None:
    """Run by a rank: measure what was asked for, and write what was found."""
    options = argparse.Namespace(**json.loads((folder / "options.json").read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.part == "gradients":
        figures = gradients(options)
    else:
        rank = Rank(options, options.kind)
        for _ in range(2):  # makes state, plan and kernels
            rank.optimizer.step()
        figures = MEASURE[options.part](rank, options.rounds)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measure(part: str, kind: str, ranks: int, megabits: float, options: argparse.Namespace) -> list[Found]:
    """Start the ranks, and return what each has found."""
    with tempfile.TemporaryDirectory() as name, hosts(ranks, megabits or None) as places:
        folder = Path(name)
        case = {**vars(options), "part": part, "kind": kind}
        (folder / "options.json").write_text(json.dumps(case))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for number, host in enumerate(places):
            env = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            env |= {"GLOO_SOCKET_IFNAME": host.interface}
            command = [*host.prefix, sys.executable, "-m", "benchmarks.studies.overlap", "--serve", name]
            started.append(subprocess.Popen(command, env=env))
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        return [json.loads((folder / f"{number}.json").read_text()) for number in range(ranks)]


# ------------------------------------------------------------------ the command


def rows_of_bounds(figures: dict[str, Found]) -> list[list[str]]:
    """A table."""
    rows = []
    for name, f in figures.items():
        low, _, high = quartiles(f["ratios"])
        times = [f"{f[part]:.1f}" for part in ("step", "computing", "communicating", "adamw", "transport")]
        ratios = f"{f['ratio']:.2f}", f"{low:.2f} – {high:.2f}", f"{f['ratio_with_transport']:.2f}"
        rows.append([name, *ratios, *times, str(f["buckets"])])
    return rows


def main() -> None:
    """Measure, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["bound"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--megabits", nargs="+", type=float, default=[100, 200], help="of a link, 0: the loopback device"
    )
    parser.add_argument("--blocks", type=int, default=12, help="of 256×1024 and 1024×256")
    parser.add_argument("--vocabulary", type=int, default=4096, help="rows of AdamW's embedding, 256 wide")
    parser.add_argument("--bucket-mb", type=float, default=0.5, help="of an owner; the budget is 16 of it")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of computing and wire")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", type=Path, help="where to write the spans of the trace")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    plain = argparse.Namespace(**{k: v for k, v in vars(options).items() if not isinstance(v, Path)})
    load = round(os.getloadavg()[0], 2)
    tables: dict[str, dict[str, Found]] = {part: {} for part in options.only}
    for part in options.only:
        for kind in options.kinds if part != "gradients" else ["ddp"]:
            for ranks in options.ranks:
                for megabits in options.megabits:
                    link = f"{megabits:g} Mbit/s" if megabits else "loopback"
                    figures = measure(part, kind, ranks, megabits, plain)
                    tables[part][f"{kind}, {ranks} ranks, {link}"] = (
                        figures[0] if part != "trace" else {"ranks": figures}
                    )
    if "bound" in tables:
        header = [
            "",
            "ratio",
            "middle half",
            "with transport",
            "step ms",
            "computing",
            "communicating",
            "AdamW",
            "transport",
        ]
        header += ["buckets"]
        print_rows("(step − AdamW) over max(computing, communicating)", header, rows_of_bounds(tables["bound"]))
    if "gradients" in tables:
        names = ["adamw", "muon", "to_owners", "muon over adamw", "to_owners over adamw"]
        rows = [[case, *(f"{figures[name]:.2f}" for name in names)] for case, figures in tables["gradients"].items()]
        print_rows("backward and step, milliseconds", ["", *names], rows)
    for name, figures in tables.get("trace", {}).items():
        for number, spans in enumerate(rank_figures["spans"] for rank_figures in figures["ranks"]):
            shares = hidden(spans)
            label = ", ".join(f"{share:.0%}" for share in shares)
            print(f"{name}, rank {number}: of each gather under the bucket before: {label}")
        if options.trace is not None:
            options.trace.write_text(json.dumps(summary_of(name, figures["ranks"], options), indent=1) + "\n")
    if options.json:
        facts = {"load_before": load, "rounds": options.rounds, "blocks": options.blocks, "dtype": options.dtype}
        tables.pop("trace", None)
        write_json(options.json, "benchmarks/studies/overlap.py", Entries((), (), {}), tables, facts)


def summary_of(name: str, ranks: list[Found], options: argparse.Namespace) -> Found:
    """What the picture is drawn from: milliseconds from the beginning of the step."""
    shares = [hidden(rank_figures["spans"]) for rank_figures in ranks]
    start = min(span["begin"] for rank_figures in ranks for span in rank_figures["spans"])
    for rank_figures in ranks:
        for span in rank_figures["spans"]:
            span["begin"], span["end"] = (round(1e3 * (span[end] - start), 2) for end in ("begin", "end"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "case": name,
        "matrices": f"{2 * options.blocks} of 256 × 1024",
        "hidden": shares,
        "ranks": [rank_figures["spans"] for rank_figures in ranks],
    }


if __name__ == "__main__":
    main()
