"""Every rule of muonmesh and AdamW on language models of three sizes: rates and decays swept with the same budget.

    PYTHONPATH=src python -m benchmarks.studies.evidence                           # a CPU, 2 processes: under two hours
    PYTHONPATH=src python -m benchmarks.studies.evidence --budget try --steps 30 --seeds 1               # minutes
    PYTHONPATH=src python -m benchmarks.studies.evidence --device cuda --workers 14 --seconds 240 --out evidence.jsonl
    PYTHONPATH=src python -m benchmarks.studies.evidence --resume evidence.jsonl --seconds 240           # goes on
    PYTHONPATH=src python -m benchmarks.studies.evidence --report evidence.jsonl \
        --json benchmarks/results/evidence.json --picture docs/images/evidence.png

The text is Python's own standard library, with a tokenizer made of it on the spot. `sweep.py` says in which order the
trainings come: a cut leaves the rules level. Each finished one is a line of the file at once. A rule is measured by
the steps in which the mean over seeds comes to AdamW's final validation loss, and by the seconds that these take.
Trainings crowd each other where many run at once, so seconds are not theirs: before the trainings each rule takes some
whole steps (forward, backward, clipping, optimizer) alone, in turns with the others, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies.crew import Crew, Train
from benchmarks.studies.decoder import Decoder, Size, Text, loss
from benchmarks.studies.sweep import (
    BUDGETS,
    RULES,
    Job,
    chosen,
    final,
    middle,
    rate_at,
    record,
    remaining_jobs,
    steps_to,
)
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.numerics.rules.dynmuon import power_at
from muonmesh.tools.cli.corpus import load_corpus_of, prepare_corpus

VOCAB, POINTS = 2048, 20
SIZES = {
    "48x2": Size(48, 2, 2, context=128, batch=8, held_out=24),
    "64x3": Size(64, 3, 2, context=128, batch=8, held_out=24),
    "96x4": Size(96, 4, 3, context=128, batch=8, held_out=24),
    "128x4": Size(128, 4, 4, context=256, batch=16),
    "256x6": Size(256, 6, 4, context=256, batch=16),
    "512x8": Size(512, 8, 8, context=256, batch=16),
}
REFERENCE_WIDTH = 128
"""The width at which rates are those of `RULES` times 2; they go with 1/√width, and the sweep goes around them."""
_BRIEF = [rule for rule in RULES if rule not in ("cautious", "scion head")]
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "sizes": ["48x2", "64x3", "96x4"],
        "workers": 2,
        "longest": 240.0,
        "steps": 200,
        "budget": "short",
        "rules": list(RULES),
    },
    "cuda": {
        "sizes": ["128x4", "256x6", "512x8"],
        "workers": 14,
        "longest": 12.0,
        "steps": 300,
        "budget": "brief",
        "rules": _BRIEF,
    },
}
WARM_STEPS, BLOCKS = 3, {"cpu": (9, 1), "cuda": (4, 5)}  # of the timing: turns, and steps without a pause in each
MARGIN = 1.05  # over the longest training of a kind, for the next
TOO_SLOW, FAILURES = (
    4.0,
    3,
)  # times the usual seconds of a size, and errors, after which a rule is left out at that size


def build(job: Job, vocab: int, device: torch.device) -> tuple[nn.Module, mm.Muon]:
    """A fresh model and the optimizer of a training."""
    size = SIZES[job.size]
    torch.manual_seed(job.seed)  # on the host, so that all devices begin alike
    model = Decoder(size, vocab).to(device)
    settings = {key: value for key, value in RULES[job.rule].items() if key != "lr"}
    times = 2 * job.multiple * math.sqrt(REFERENCE_WIDTH / size.width)
    if "muon" in settings:
        settings["muon"] = {**settings["muon"], "lr": settings["muon"]["lr"] * times}
    lr = RULES[job.rule]["lr"] * times
    return model, mm.from_model(model, lr=lr, weight_decay=job.decay, process_group="local", **settings)


def train(job: Job, text: Text, steps: int) -> dict[str, Any]:
    """One training: validation losses by step, the peak rate, and seconds, which neighbors make longer."""
    started, size = time.perf_counter(), SIZES[job.size]
    model, optimizer = build(job, text.vocab, text.device)
    held_out, order = text.held_out(size), text.order(size, steps, job.seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    measured, every = list[tuple[int, Tensor]](), max(1, steps // POINTS)
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_at(step, steps)
            if group["algorithm"] == "dynmuon":
                group["dynmuon_power"] = power_at(step / steps)
        take_step(model, optimizer, text.window(order[step], size.context))
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                measured.append((step + 1, loss(model, held_out)))
    losses = torch.stack([value for _, value in measured]).tolist()  # the one wait for the device
    curve = [(step, round(value, 5)) for (step, _), value in zip(measured, losses, strict=True)]
    alive = next((i for i, (_, value) in enumerate(curve) if not math.isfinite(value)), len(curve))
    return {
        "validation": curve[:alive] if alive == len(curve) else [*curve[:alive], (curve[alive][0], math.inf)],
        "lr": optimizer_rate(peaks, optimizer),
        "seconds": round(time.perf_counter() - started, 2),
    }


def optimizer_rate(peaks: Sequence[float], optimizer: mm.Muon) -> float:
    """The peak rate of the matrices, or of AdamW where it has them all."""
    kinds = [group["algorithm"] for group in optimizer.param_groups]
    return float(peaks[next((i for i, kind in enumerate(kinds) if kind not in ("adamw", "scion_sign")), 0)])


def take_step(model: nn.Module, optimizer: mm.Muon, batch: Tensor) -> None:
    loss(model, batch).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def ready(settings: Mapping[str, Any]) -> Train:
    """Prepare a worker: its device, and the text on it."""
    torch.set_num_threads(1)
    device = torch.device(settings["device"])
    folder = settings["corpus"]
    text = Text(replace(load_corpus_of(Path(folder)), directory=folder), device)  # it may have been written elsewhere
    return lambda job: train(job, text, settings["steps"])


def timing(
    size: str, rules: Sequence[str], text: Text, *, slowest: float, until: float, quiet: Callable[[], None]
) -> dict[str, float]:
    """Milliseconds of a whole step of each rule, medians of turns after `quiet`; on a CPU processor time of a thread.

    A rule that takes more than `slowest` seconds a step gets one turn, and all get few after the time `until`.
    """
    trained: dict[str, tuple[nn.Module, mm.Muon]] = {}
    times: dict[str, list[float]] = {rule: [] for rule in rules}
    kind = text.device.type
    turns, steps = BLOCKS[kind]
    batch = text.window(text.order(SIZES[size], 1, 0)[0], SIZES[size].context)

    def block(rule: str, count: int) -> float:
        wait_for(text.device)
        clock = time.perf_counter if kind == "cuda" else time.process_time
        started = clock()
        for _ in range(count):
            take_step(*trained[rule], batch)
        wait_for(text.device)
        return (clock() - started) / count

    for rule in rules:
        trained[rule] = build(Job(size, rule, 0.5, 0.1, 0), text.vocab, text.device)
        block(rule, WARM_STEPS)
    quiet()
    for round_number in range(turns):
        for rule in rules:
            slow = bool(times[rule]) and times[rule][0] > slowest
            if (round_number < 3 or time.monotonic() < until) and not slow:
                times[rule].append(block(rule, steps))
    trained.clear()
    torch.cuda.empty_cache()  # nothing without CUDA
    return {rule: round(1000 * statistics.median(values), 3) for rule, values in times.items()}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Lines:
    """The records of a comparison: a file of JSON lines that grows by one at once, whatever happens after it."""

    def __init__(self, path: Path, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path, self.records = path, [*earlier]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")  # it may be the file that they were read from
        beside.write_text("".join(json.dumps(record) + "\n" for record in earlier))
        os.replace(beside, path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a record, and have it on the disk."""
        self.records.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def runs(self) -> list[Mapping[str, Any]]:
        """Return the finished trainings."""
        return [line for line in self.records if line["kind"] == "run"]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a last line that was cut is left out."""
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise
    return records


def milliseconds(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step by size and rule, as they were measured last."""
    times: dict[str, dict[str, float]] = {}
    for entry in records:
        if entry["kind"] == "timing":
            times.setdefault(entry["size"], {}).update(entry["milliseconds"])
    return times


class Comparison:
    """What is to be trained until when, and what is known of it."""

    def __init__(self, lines: Lines, options: argparse.Namespace, started: float) -> None:
        self.lines, self.options = lines, options
        self.until = started + options.seconds if options.seconds else math.inf
        self.failed: list[Job] = []

    def rules(self, size: str) -> list[str]:
        """Return the rules that are still tried at a size: which are neither too slow nor fail."""
        known_times, limit = (
            milliseconds(self.lines.records).get(size, {}),
            1000 * self.options.longest / self.options.steps,
        )
        seconds_by_rule: dict[str, list[float]] = {}
        for run in self.lines.runs():
            if run["size"] == size:
                seconds_by_rule.setdefault(run["rule"], []).append(run["seconds"])
        usual = statistics.median([seconds for times in seconds_by_rule.values() for seconds in times] or [math.inf])
        slow = {
            rule for rule, seconds in seconds_by_rule.items() if rule != "adamw" and min(seconds) > TOO_SLOW * usual
        }
        failed = [job.rule for job in self.failed if job.size == size]
        rules = [rule for rule in self.options.rules if known_times.get(rule, math.inf if known_times else 0) <= limit]
        return [rule for rule in rules if rule not in slow and failed.count(rule) < FAILURES]

    def next(self, running: Sequence[Job]) -> Job | None:
        """Return the training that is to begin now; None if there is none that would end in time."""
        runs = [*self.lines.runs(), *(record(job, {"validation": []}) for job in self.failed)]
        for size in self.options.sizes:
            for job in remaining_jobs(runs, [size], self.rules(size), BUDGETS[self.options.budget], self.options.seeds):
                if job not in running and time.monotonic() + MARGIN * self.estimate(job) <= self.until:
                    return job
        return None

    def estimate(self, job: Job) -> float:
        """Return the seconds that a training may take: the longest of its kind; of others of its size; alone."""
        same = [run for run in self.lines.runs() if run["size"] == job.size]
        times = [run["seconds"] for run in same if run["rule"] == job.rule] or [run["seconds"] for run in same]
        alone = milliseconds(self.lines.records).get(job.size, {}).get(job.rule, 0) * self.options.steps / 1000
        return float(max([*times, alone]))

    def work(self, crew: Crew) -> None:
        """Let the crew train until nothing is left, or the time is over."""
        while crew.workers:
            for worker in crew.idle():
                job = self.next(crew.running())
                if job is None:
                    break
                crew.give(worker, job)
            waiting = [worker for worker in crew.workers if not worker.is_ready]
            if not crew.running() and (not waiting or self.next([]) is None):
                return
            if time.monotonic() >= self.until:
                print(f"the time is over; {len(crew.running())} trainings are given up", flush=True)
                return
            for job, result in crew.finished(min(1.0, max(0.0, self.until - time.monotonic()))):
                self.note(job, result)

    def note(self, job: Job, result: Mapping[str, Any]) -> None:
        """Keep what a training found."""
        if "error" in result:
            self.failed.append(job)
            self.lines.add({**record(job, result), "kind": "error"})
        else:
            self.lines.add(record(job, result))
        message = result.get("error") or f"{final(result):.4f} in {result['seconds']:.1f} s"
        print(f"{job.size} {job.rule} × {job.multiple:g}, decay {job.decay:g}, seed {job.seed}: {message}", flush=True)


def table(runs: Sequence[Mapping[str, Any]], times: Mapping[str, float]) -> list[list[str]]:
    """The rows of one size, as `HEADINGS` says; the last three are to AdamW's final loss, for a step, and to it."""
    target, rows = statistics.mean(final(run) for run in chosen(runs, "adamw")), []
    for rule in (rule for rule in RULES if any(run["rule"] == rule for run in runs)):
        trainings = chosen(runs, rule)
        losses, steps = [final(run) for run in trainings], steps_to(middle(trainings), target)
        reached, cost = math.isfinite(steps), times.get(rule)
        rows.append(
            [
                f"`{rule}`" if rule != "adamw" else "AdamW",
                f"{trainings[0]['lr']:.1e}".replace("e-0", "e-"),
                f"{trainings[0]['decay']:g}",
                f"{sum(run['rule'] == rule for run in runs)}",
                f"{statistics.mean(losses):.3f}",
                f"{max(losses) - min(losses):.3f}",
                f"{steps:.0f}" if reached else "never",
                f"{cost:.1f}" if cost else "–",
                f"{cost * steps / 1000:.2f}" if cost and reached else "–",
            ]
        )
    return rows


HEADINGS = ("rule", "rate", "decay", "trainings", "loss", "spread", "steps", "ms a step", "seconds")


def by_size(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the trainings of each size at which AdamW, and so a target, is among them."""
    sizes: dict[str, list[Mapping[str, Any]]] = {}
    for entry in records:
        if entry["kind"] == "run":
            sizes.setdefault(entry["size"], []).append(entry)
    return {size: sizes[size] for size in SIZES if any(run["rule"] == "adamw" for run in sizes.get(size, []))}


def show(records: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    times = milliseconds(records)
    for size, runs in by_size(records).items():
        print(f"\n{size}: {len(runs)} trainings\n")
        print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
        for row in table(runs, times.get(size, {})):
            print(f"| {' | '.join(row)} |")
    for entry in records:
        if entry["kind"] == "error":
            print(f"failed: {entry['size']} {entry['rule']}: {entry['error']}")


def write_summary(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write what the pages and the picture are made of: a line for each training."""
    content = {
        "about": [record for record in records if record["kind"] == "about"],
        "milliseconds": milliseconds(records),
        "errors": [record for record in records if record["kind"] == "error"],
    }
    summary = (
        {key: run[key] for key in ("size", "rule", "multiple", "decay", "seed", "lr", "seconds", "validation")}
        for runs in by_size(records).values()
        for run in runs
    )
    head = json.dumps(content, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "runs": [\n  ' + ",\n  ".join(json.dumps(run) for run in summary) + "\n ]\n}\n")


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Validation losses: every training in grey, and each rule at its final pair, the mean over seeds, in color."""
    sys.path.append(str(Path(__file__).parents[2] / "docs" / "images" / "draw"))
    from canvas import INK, QUIET, save
    from matplotlib import colormaps, pyplot

    sizes = by_size(records)
    shades = colormaps["tab20"].colors
    palette = [shade for shade in (*shades[::2], *shades[1::2]) if max(shade) - min(shade) > 0.1]  # no gray
    colors = dict(zip([rule for rule in RULES if rule != "adamw"], palette, strict=False))
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(4 * len(sizes), 4.2), dpi=90, layout="constrained", squeeze=False
    )
    for axes, (size, runs) in zip(panels[0], sizes.items(), strict=True):
        for run in runs:
            axes.plot(*zip(*run["validation"], strict=True), color="#c4c4c4", linewidth=0.4, zorder=1)
        ends = []
        for rule in (rule for rule in RULES if any(run["rule"] == rule for run in runs)):
            curve = middle(chosen(runs, rule))["validation"]
            ends.append(curve[-1][1])
            style = {"color": INK, "linewidth": 2.2} if rule == "adamw" else {"color": colors[rule], "linewidth": 1.3}
            axes.plot(*zip(*curve, strict=True), label="AdamW" if rule == "adamw" else rule, zorder=2, **style)
        axes.set_title(size.replace("x", " wide, ") + " layers", fontsize=10, color=INK, loc="left")
        axes.set_xlabel("step", fontsize=9, color=QUIET)
        axes.set_ylim(min(ends) - 0.1, min(ends) + 2.4)
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("validation loss", fontsize=9, color=QUIET)
    handles = {text: line for axes in panels[0] for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        fontsize=8,
        frameon=False,
        loc="outside lower center",
        ncols=len(RULES) // 2 + 1,
    )
    save(figure, path)


@contextmanager
def shared_device(shared: bool) -> Iterator[None]:
    """Let processes share a GPU's time by CUDA's multi-process service where it starts; else they take turns."""
    if not shared:
        yield
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    control, probe = ["nvidia-cuda-mps-control"], "import torch; torch.ones(1, device='cuda').sum().item()"
    works = False
    try:
        subprocess.run([*control, "-d"], env={**os.environ, **names}, check=True, timeout=20)
        subprocess.run([sys.executable, "-c", probe], env={**os.environ, **names}, check=True, timeout=60)
        works = True
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no multi-process service: {error}", flush=True)
    if works:
        os.environ.update(names)
        print("the multi-process service shares the device", flush=True)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                control, input="quit -t 5\n", text=True, env={**os.environ, **names}, timeout=20, check=False
            )


def about(options: argparse.Namespace, corpus: Any) -> dict[str, Any]:
    """Say what all trainings of a file have in common, "same", and where they ran."""
    same = {
        "device": options.device,
        "torch": torch.__version__,
        "steps": options.steps,
        "corpus": corpus.digest,
        "tokens": corpus.train_tokens,
        "vocab": corpus.vocab,
    }
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    settings = {
        "budget": options.budget,
        "seeds": options.seeds,
        "workers": options.workers,
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    }
    date = datetime.now(UTC).date().isoformat()
    return {"kind": "about", "same": same, "name": device, "date": date, **settings}


def measure_steps(lines: Lines, options: argparse.Namespace, corpus: Any, until: float, crew: Crew) -> None:
    """Time the steps that the file lacks while the crew waits; a rule that is too slow is not tried at larger sizes."""
    torch.set_num_threads(1)
    text, limit = Text(corpus, torch.device(options.device)), options.longest / options.steps
    slow: set[str] = set()
    for size in options.sizes:
        measured = milliseconds(lines.records).get(size, {})
        missing = [rule for rule in options.rules if rule not in measured and rule not in slow]
        if missing:
            measured = timing(size, missing, text, slowest=limit, until=until, quiet=lambda: crew.gather(60))
            lines.add({"kind": "timing", "size": size, "milliseconds": measured})
            print(f"{size}, milliseconds of a step: {measured}", flush=True)
        slow |= {rule for rule, cost in measured.items() if cost > 1000 * limit}
    if slow:
        print(f"left out, because a training takes longer than {options.longest:g} s: {sorted(slow)}", flush=True)


def parsed() -> argparse.Namespace:
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(DEFAULTS), default="cpu")
    parser.add_argument("--workers", type=int, help="processes")
    parser.add_argument("--no-mps", action="store_true", help="do not try CUDA's multi-process service")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="width x layers; the first is done first")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), help="adamw is among them")
    parser.add_argument("--budget", choices=list(BUDGETS), help="trainings of each rule at each size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a training")
    parser.add_argument("--seconds", type=float, help="begin no training that would end later than this")
    parser.add_argument("--longest", type=float, help="leave out rules whose training alone takes more seconds")
    parser.add_argument("--timing-seconds", type=float, default=30.0, help="few turns of timing after this")
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--out", type=Path, help="the file of finished trainings; runs/evidence.jsonl")
    parser.add_argument("--resume", type=Path, help="go on with this file")
    parser.add_argument("--report", type=Path, help="train nothing; print, write and draw what is in this file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.rules = list(dict.fromkeys(["adamw", *options.rules]))
    options.out = options.out or options.resume or Path("runs/evidence.jsonl")
    if options.report is None and options.out.exists() and options.out != options.resume:
        parser.error(f"{options.out} is there already; write --resume {options.out}, or another --out")
    return options


def compare(options: argparse.Namespace, started: float) -> list[Mapping[str, Any]]:
    """Train, and return the records."""
    corpus = prepare_corpus((), vocab=VOCAB, cache=options.cache)
    says, earlier = about(options, corpus), read(options.resume) if options.resume else []
    for entry in earlier:
        if entry["kind"] == "about" and entry["same"] != says["same"]:
            raise SystemExit(f"{options.resume} was made with {entry['same']}, and this is {says['same']}")
    lines = Lines(options.out, earlier)
    lines.add(says)
    print(f"{time.monotonic() - started:.1f} s: the text is ready", flush=True)
    settings = {"device": options.device, "corpus": corpus.directory, "steps": options.steps}
    crew = Crew(options.workers, ready, settings)
    try:
        measure_steps(lines, options, corpus, started + options.timing_seconds, crew)
        print(f"{time.monotonic() - started:.1f} s: the steps are timed", flush=True)
        Comparison(lines, options, started).work(crew)
    finally:
        crew.end()
    print(f"{time.monotonic() - started:.1f} s: {len(lines.runs())} trainings are in {options.out}", flush=True)
    return lines.records


def main() -> None:
    started, options = time.monotonic(), parsed()
    if options.report:
        records: list[Mapping[str, Any]] = [*read(options.report)]
    else:
        with shared_device(options.device == "cuda" and not options.no_mps):
            records = compare(options, started)
    show(records)
    if options.json is not None:
        write_summary(records, options.json)
    if options.picture is not None:
        draw(records, options.picture)


if __name__ == "__main__":
    main()
