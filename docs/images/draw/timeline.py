"""Measure one optimizer step on two gloo ranks, and draw what each rank did when.

    python docs/images/draw/timeline.py                # draws docs/images/timeline.png from the kept measurement
    python docs/images/draw/timeline.py --measure      # measures first, and keeps it in docs/images/draw/timeline.json

The measurement notes when the exchange calls the optimizer's work, and when it starts, awaits and completes its
collectives. Every call is noted and passed on to what it would have reached anyhow.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from canvas import IMAGES, INK, save
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.comm.exchange import Exchange

KEPT = Path(__file__).with_suffix(".json")
RANKS, ROUNDS, WARM_UP = 2, 100, 10
WIDTH, HIDDEN, LAYERS, VOCABULARY = 256, 1024, 8, 16384
BUCKET_MB = 4.0

COLOURS = {
    "1 preflight": "#8d99ae",
    "2 momentum": "#2e8b70",
    "AdamW": "#7d5ba6",
    "3 gather": "#edae49",
    "4 orthogonalise": "#30638e",
    "5 scatter": "#d1495b",
    "6 update": "#66b2a0",
}
DARK = ("1 preflight", "2 momentum", "AdamW", "4 orthogonalise", "5 scatter")  # white text can be read on these

Span = dict[str, Any]


class Model(nn.Module):
    """Two layers' MLPs, which are Muon's, and an embedding, which is AdamW's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        sizes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * LAYERS
        self.layers = nn.ModuleList(nn.Linear(inside, out, bias=False) for inside, out in sizes)


class Watch:
    """What this rank did in the step that is being watched, as spans of seconds."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def note(self, lane: str, stage: str, bucket: int | None, begin: float) -> Span:
        """Keep a span that ends now. Host calls of one stage and bucket that follow each other are one span."""
        now = time.perf_counter()
        last = next((span for span in reversed(self.spans) if span["lane"] == lane), None)
        if lane == "host" and last is not None and (last["stage"], last["bucket"]) == (stage, bucket):
            last["end"] = now
            return last
        span = {"lane": lane, "stage": stage, "bucket": bucket, "begin": begin, "end": now}
        self.spans.append(span)
        return span


class WatchedWork:
    """The work of a step (`muonmesh.comm.work.Work`); every call is noted and passed on."""

    def __init__(self, work: Any, exchange: Exchange, watch: Watch) -> None:
        self._work, self._watch = work, watch
        buckets = exchange.plan.buckets
        self._bucket_of = {assignment: number for number, bucket in enumerate(buckets) for assignment in bucket}

    def prepare(self, assignments: Sequence[int]) -> None:
        """Fold gradients into momenta."""
        begin = time.perf_counter()
        self._work.prepare(assignments)
        self._watch.note("host", "2 momentum", self._bucket_of[assignments[0]], begin)

    def read(self, leg: Any, into: torch.Tensor) -> None:
        """Write a direction, most of them into the send buffer."""
        begin = time.perf_counter()
        self._work.read(leg, into)
        self._watch.note("host", "2 momentum", self._bucket_of[leg.assignment], begin)

    def orthogonalize(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]) -> None:
        """Orthogonalise the matrices of a bucket that this rank owns."""
        begin = time.perf_counter()
        self._work.orthogonalize(batches)
        if batches:
            self._watch.note("host", "4 orthogonalise", self._bucket_of[batches[0][2][0]], begin)

    def write(self, leg: Any, update: torch.Tensor) -> None:
        """Update weights."""
        begin = time.perf_counter()
        self._work.write(leg, update)
        self._watch.note("host", "6 update", self._bucket_of[leg.assignment], begin)

    def step_adamw(self) -> None:
        """Step AdamW's half."""
        begin = time.perf_counter()
        self._work.step_adamw()
        self._watch.note("host", "AdamW", None, begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class WatchedTransfer:
    """A collective under way; waiting for it is noted."""

    def __init__(self, work: dist.Work, watch: Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self) -> None:
        """Wait for the collective."""
        begin = time.perf_counter()
        self._work.wait()
        self._watch.note("host", "waits", None, begin)


class Ends:
    """Notes when collectives end, on a thread of its own that is there before the step.

    (A callback of a collective's future would wait for the thread that waits for the collective.)
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[dist.Work, Span]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def see(self, transfer: dist.Work, span: Span) -> None:
        """Write the end of a collective into a span."""
        self._waiting.put((transfer, span))

    def _run(self) -> None:
        under_way: list[tuple[dist.Work, Span]] = []
        while True:
            if not under_way or not self._waiting.empty():
                under_way.append(self._waiting.get())
            for entry in list(under_way):
                if entry[0].is_completed():
                    entry[1]["end"] = time.perf_counter()
                    under_way.remove(entry)
            time.sleep(2e-4)


def watched(watch: Watch, ends: Ends, step: Callable[[], Any]) -> None:
    """Take a step with everything noted in `watch`."""
    run, all_to_all = Exchange.run, dist.all_to_all_single
    begin = time.perf_counter()

    def noted_run(exchange: Exchange, work: Any) -> Any:
        watch.note("host", "1 preflight", None, begin)
        return run(exchange, WatchedWork(work, exchange, watch))

    def noted_all_to_all(*args: Any, **kwargs: Any) -> WatchedTransfer:
        before = next(s["stage"] for s in reversed(watch.spans) if s["lane"] == "host" and s["stage"] != "waits")
        stage = "3 gather" if before == "2 momentum" else "5 scatter"
        bucket = sum(span["stage"] == stage for span in watch.spans)
        span = watch.note("wire", stage, bucket, time.perf_counter())
        transfer = all_to_all(*args, **kwargs)
        ends.see(transfer, span)
        return WatchedTransfer(transfer, watch)

    Exchange.run, dist.all_to_all_single = noted_run, noted_all_to_all  # type: ignore[method-assign]
    try:
        step()
    finally:
        Exchange.run, dist.all_to_all_single = run, all_to_all  # type: ignore[method-assign]


def serve(rank: int, port: int, folder: str) -> None:
    """Take the steps of one rank and write the spans of each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = mm.from_model(model, bucket_cap_mb=BUCKET_MB, compute_dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    steps, ends = [], Ends()
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        watch = Watch()
        watched(watch, ends, optimizer.step)
        dist.barrier()
        steps.append(watch.spans)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(steps[WARM_UP:]))
    dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Run the ranks; return the step that took the least time, which other programs disturbed least."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(serve, (port, folder), nprocs=RANKS)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    steps = list(zip(*ranks, strict=True))
    spans = [[span for rank in step for span in rank] for step in steps]
    durations = [max(s["end"] for s in some) - min(s["begin"] for s in some) for some in spans]
    chosen = durations.index(min(durations))
    start = min(span["begin"] for span in spans[chosen])
    for span in spans[chosen]:  # milliseconds from the beginning of the step: perf_counter is one clock for all ranks
        span["begin"], span["end"] = (round(1000 * (span[end] - start), 2) for end in ("begin", "end"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "milliseconds": [round(1000 * duration, 1) for duration in sorted(durations)],
        "ranks": steps[chosen],
    }


def draw(measured: dict[str, Any], picture: Path) -> None:
    """Write the picture as PNG: the whole step, and its beginning on a larger scale."""
    ranks = measured["ranks"]
    whole = max(span["end"] for spans in ranks for span in spans)
    beginning = max(span["end"] for spans in ranks for span in spans if span["stage"] == "3 gather") * 1.06
    figure, both = pyplot.subplots(2, 1, figsize=(9.6, 6.6), dpi=150, layout="constrained")
    for axes, end, title in zip(both, (whole, beginning), ("The whole step", "Its beginning"), strict=True):
        _draw_lanes(axes, ranks, end)
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    both[1].set_xlabel("milliseconds since the step began", fontsize=10)
    figure.legend(
        [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS.values()],
        list(COLOURS),
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=9.5,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    save(figure, picture)
    pyplot.close(figure)


def _draw_lanes(axes: Any, ranks: Sequence[Sequence[Span]], end: float) -> None:
    """Draw two lanes a rank, one for what it computes and one for its transfers, up to a time."""
    y, ticks = 0.0, {}
    for rank, spans in enumerate(ranks):
        ticks |= {y + 0.4: f"rank {rank} computes", y + 1.15: "transfers"}
        for span in spans:
            if span["stage"] in COLOURS and span["begin"] < end:
                top, height = (y, 0.8) if span["lane"] == "host" else (y + 0.88, 0.5)
                _bar(axes, span, top, height, end)
        y += 1.75
    axes.set_xlim(0, end)
    axes.set_ylim(y - 0.3, -0.1)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9.5)
    axes.tick_params(axis="y", left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def _bar(axes: Any, span: Span, top: float, height: float, end: float) -> None:
    """Draw a span with its name and the number of its bucket, or what of these it is wide enough to hold."""
    stage, width = span["stage"], min(span["end"], end) - span["begin"]
    axes.barh(top, width, left=span["begin"], height=height, color=COLOURS[stage], align="edge")
    name = stage.lstrip("0123456789 ")
    bucket = "" if span["bucket"] is None else str(span["bucket"] + 1)
    named = f"{name} bucket {bucket}" if bucket else name
    text = next((t for t in (named, bucket if bucket else name) if len(t) * 0.0095 * end < width), "")
    ink = "white" if stage in DARK else INK
    middle = span["begin"] + width / 2, top + height / 2
    axes.text(*middle, text, ha="center", va="center", fontsize=9, color=ink, clip_on=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--picture", type=Path, default=IMAGES / "timeline.png")
    arguments = parser.parse_args()
    if arguments.measure:
        KEPT.write_text(json.dumps(measure(), indent=1) + "\n")
    draw(json.loads(KEPT.read_text()), arguments.picture)
