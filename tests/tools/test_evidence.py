"""The comparison of rules: each gets the same trainings, whatever is cut, and nothing that was trained is lost."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.studies.crew import Crew
from benchmarks.studies.decoder import Decoder, Size, Text
from benchmarks.studies.evidence import Comparison, Lines, build, read, table
from benchmarks.studies.sweep import (
    BUDGETS,
    RULES,
    Budget,
    Job,
    around,
    chosen,
    final,
    rate_at,
    record,
    remaining_jobs,
    steps_to,
)

ROOT = Path(__file__).parents[2]
FULL = BUDGETS["full"]
SIZES, SOME = ("48x2", "64x3"), ("adamw", "muon", "soap")


def loss_of_job(job: Job) -> float:
    """A bowl whose lowest point lies at another place for each rule: soap's beyond the rates of the first stage."""
    best = {"adamw": -1.0, "muon": 0.4, "soap": 2.8}[job.rule]
    return 4 + (math.log2(job.multiple) - best) ** 2 + abs(math.log(job.decay / 0.5)) + 0.01 * job.seed


def swept(budget: Budget, most: int | None = None, loss: Callable[[Job], float] = loss_of_job) -> list[dict[str, Any]]:
    """Train one job after another, as a sweep with one worker would."""
    runs: list[dict[str, Any]] = []
    while len(runs) != most and (jobs := remaining_jobs(runs, SIZES, SOME, budget, 3)):
        runs.append(record(jobs[0], {"validation": [(10, 5.0), (20, loss(jobs[0]))], "lr": 0.1, "seconds": 1.0}))
    return runs


@pytest.mark.parametrize("name", list(BUDGETS))
def test_every_rule_gets_the_trainings_of_the_budget(name: str) -> None:
    runs = swept(BUDGETS[name])
    assert Counter((run["size"], run["rule"]) for run in runs) == dict.fromkeys(
        itertools.product(SIZES, SOME), BUDGETS[name].trainings(3)
    )
    assert len({tuple(run[key] for key in Job.__dataclass_fields__) for run in runs}) == len(runs)


def test_a_cut_leaves_the_rules_level_and_changes_nothing() -> None:
    runs = swept(FULL)
    for finished in range(len(runs)):
        per_rule = Counter({rule: 0 for rule in SOME}) + Counter(run["rule"] for run in runs[:finished])
        assert max(per_rule.values(), default=0) - min(per_rule[rule] for rule in SOME) <= 1
        assert remaining_jobs(runs[:finished], SIZES, SOME, FULL, 3)[0] == Job(
            *(runs[finished][key] for key in Job.__dataclass_fields__)
        )
    assert [size for size, _ in itertools.groupby(run["size"] for run in runs)] == list(SIZES)


def test_the_final_pair_is_the_best_of_those_with_all_seeds() -> None:
    first = [run for run in swept(FULL) if run["size"] == SIZES[0]]
    pairs = {rule: (chosen(first, rule)[0]["multiple"], chosen(first, rule)[0]["decay"]) for rule in SOME}
    assert pairs == {"adamw": (0.5, 0.5), "muon": (1.4142, 0.5), "soap": (8.0, 0.5)}
    assert [run["seed"] for run in chosen(first, "muon")] == [0, 1, 2]
    lucky = record(Job(SIZES[0], "muon", 9.0, 0.1, 0), {"validation": [(20, 0.0)], "lr": 0.1, "seconds": 1.0})
    assert chosen([*first, lucky], "muon")[0]["multiple"] == 1.4142  # it has one seed only


def test_pairs_around_the_best_one_lie_between_or_beyond() -> None:
    assert around((1.0, 0.1), FULL.multiples, FULL.decays) == [(1.4142, 0.1), (0.7071, 0.1), (1.0, 0.02)]
    assert around((4.0, 0.5), FULL.multiples, FULL.decays) == [(5.6569, 0.5), (8.0, 0.5), (4.0, 1.5)]
    assert around((0.25, 0.5), FULL.multiples, FULL.decays) == [(0.1768, 0.5), (0.125, 0.5), (0.25, 1.5)]


def test_trainings_that_diverged_end_a_stage_too() -> None:
    runs = swept(FULL, loss=lambda job: math.inf if job.rule == "soap" else loss_of_job(job))
    assert Counter(run["rule"] for run in runs)["soap"] == 2 * FULL.trainings(3)
    assert math.isinf(final(chosen(runs, "soap")[0]))


def comparison(path: Path, seconds: float = 0, started: float = 0.0, longest: float = 100.0) -> Comparison:
    options = argparse.Namespace(
        sizes=SIZES, rules=SOME, seeds=3, budget="full", seconds=seconds, longest=longest, steps=20
    )
    return Comparison(Lines(path), options, started)


def test_no_training_begins_that_would_end_too_late(tmp_path: Path) -> None:
    start = time.monotonic()
    work = comparison(tmp_path / "lines.jsonl", seconds=1000, started=start)
    first = work.next([])
    assert first == Job("48x2", "adamw", 1.0, 0.1, 0)
    work.note(first, {"validation": [(20, 4.0)], "lr": 0.1, "seconds": 900.0})
    second = work.next([Job("48x2", "muon", 1.0, 0.1, 0)])
    assert second == Job("48x2", "soap", 1.0, 0.1, 0), "the next that nobody trains"
    work.until = start + 800
    assert work.next([]) == Job("64x3", "adamw", 1.0, 0.1, 0), "nothing is known of that size"
    work.until = start - 1
    assert work.next([]) is None


def test_slow_and_failing_rules_are_left_out(tmp_path: Path) -> None:
    work = comparison(tmp_path / "lines.jsonl", longest=1.0)
    for size, slow in zip(SIZES, (40.0, 60.0), strict=True):
        work.lines.add({"kind": "timing", "size": size, "milliseconds": {"adamw": 10.0, "muon": 20.0, "soap": slow}})
    assert work.rules("48x2") == ["adamw", "muon", "soap"]
    assert work.rules("64x3") == ["adamw", "muon"]
    for decay in (0.1, 0.5, 1.5):
        work.note(Job("48x2", "soap", 1.0, decay, 0), {"error": "no memory"})
    assert work.rules("48x2") == ["adamw", "muon"]
    for rule, seconds in (("adamw", 1.0), ("adamw", 1.0), ("muon", 9.0)):
        work.note(Job("48x2", rule, seconds, 0.1, 0), {"validation": [(20, 4.0)], "lr": 0.1, "seconds": seconds})
    assert work.rules("48x2") == ["adamw"]


def test_every_line_is_in_the_file_at_once_and_half_a_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path)
    for number in range(3):
        lines.add({"kind": "run", "number": number})
        assert len(read(path)) == number + 1
    with path.open("a") as file:
        file.write('{"kind": "ru')
    assert Lines(path, read(path)).runs() == lines.runs()
    assert read(path) == lines.runs(), "half a line is no longer there, and a line after it is whole"


def test_a_worker_that_fails_is_replaced_and_the_others_go_on() -> None:
    crew = Crew(1, operator.itemgetter, "found", spare=1)
    jobs, results = [{"found": {"loss": 1}}, {}, {"found": {"loss": 2}}], []
    try:
        until = time.monotonic() + 60
        while len(results) < 3 and time.monotonic() < until:
            for worker in crew.idle():
                crew.give(worker, jobs[len(results)])
            results += crew.finished(1.0)
    finally:
        crew.end()
    assert results == [(jobs[0], {"loss": 1}), (jobs[1], {"error": "KeyError: 'found'"}), (jobs[2], {"loss": 2})]
    assert crew.spare == 0


def test_a_table_has_steps_and_seconds_to_the_loss_of_adamw() -> None:
    ends = {"adamw": (4.0, 4.2), "muon": (3.0, 3.2), "soap": (5.0, 5.0)}
    runs = [
        record(Job("48x2", rule, 1.0, 0.1, seed), {"validation": [(100, 5.0), (200, end)], "lr": 0.01, "seconds": 1.0})
        for rule, losses in ends.items()
        for seed, end in enumerate(losses)
    ]
    assert table(runs, {"adamw": 10.0, "muon": 20.0}) == [
        ["AdamW", "1.0e-2", "0.1", "2", "4.100", "0.200", "200", "10.0", "2.00"],
        ["`muon`", "1.0e-2", "0.1", "2", "3.100", "0.200", "147", "20.0", "2.95"],
        ["`soap`", "1.0e-2", "0.1", "2", "5.000", "0.000", "never", "–", "–"],
    ]
    assert steps_to(runs[0], 4.5) == 150
    assert steps_to(runs[0], 5.5) == 100
    assert math.isinf(steps_to(runs[-1], 4.5))


@pytest.mark.parametrize("rule", list(RULES))
def test_rates_go_with_the_multiple_in_every_rule(rule: str) -> None:
    rates = []
    for multiple in (1.0, 2.0):
        _, optimizer = build(Job("48x2", rule, multiple, 0.3, 0), 32, torch.device("cpu"))
        rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        assert {group["weight_decay"] for group in optimizer.param_groups} <= {0.3, 0.0}
    assert rates[1] == pytest.approx({name: 2 * rate for name, rate in rates[0].items()})


def test_rates_rise_and_fall_to_a_tenth() -> None:
    assert rate_at(9, 100) == 1.0
    assert rate_at(100, 100) == pytest.approx(0.1)


def test_text_is_read_once_before_again_and_held_out_windows_are_no_others() -> None:
    size, text = Size(8, 1, 2, context=4, batch=2, held_out=3), Text.__new__(Text)
    text.device, text.tokens, text.held_out_tokens = torch.device("cpu"), torch.arange(25), torch.arange(100, 125)
    order = text.order(size, 3, seed=0)
    assert sorted(order.flatten().tolist()) == [0, 4, 8, 12, 16, 20]
    assert text.window(order[0], 4).shape == (2, 5)
    assert text.held_out(size)[:, 0].tolist() == [100, 108, 116]
    model = Decoder(size, 25)
    assert model(text.window(order[0], 4)[:, :-1]).shape == (2, 4, 25)


@pytest.mark.slow
@pytest.mark.soak
def test_the_command_is_cut_goes_on_and_reports(tmp_path: Path) -> None:
    file, summary, picture = tmp_path / "lines.jsonl", tmp_path / "summary.json", tmp_path / "evidence.png"
    command = [sys.executable, "-m", "benchmarks.studies.evidence"]
    command += ["--sizes", "48x2", "--rules", "muon", "--budget", "try"]
    command += ["--steps", "4", "--seeds", "1", "--cache", str(tmp_path / "corpus")]

    def ran(*more: str) -> str:
        run = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    ran("--workers", "1", "--seconds", "0.1", "--out", str(file))
    assert [line["kind"] for line in read(file)] == ["about", "timing"]
    ran("--workers", "2", "--resume", str(file))
    assert [line["kind"] for line in read(file)] == ["about", "timing", "about", *["run"] * 8]
    assert "| `muon` |" in ran("--report", str(file), "--json", str(summary), "--picture", str(picture))
    assert len(json.loads(summary.read_text())["runs"]) == 8
    assert picture.stat().st_size > 5000
