"""`muonmesh plan`: shapes without a model, layouts without ranks, and what the command says and writes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muonmesh.layout import Replicate, Shard
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.plan_command import weights_of
from muonmesh.tools.cli.planning import parse_cluster
from muonmesh.tools.forecasts.device_rates import DeviceRates

COVERS = (
    "tools.cli.plan_command.plan",
    "tools.cli.planning.parse_cluster",
    "tools.forecasts.device_rates.DeviceRates",
)


def test_a_model_is_built_without_memory(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 2, "vocab_size": 99}))
    parts = {part.name: part for part in weights_of(str(file), parse_cluster("fsdp=4"))}
    assert parts["transformer.h.0.attn.c_attn.weight"].matrices == ("transposed", ("rows", 48, 48, 48))
    assert parts["transformer.wte.weight"].layout.shape == (99, 48)


def test_parameters_lie_as_fsdp2_tensor_and_expert_parallelism_put_them() -> None:
    def placed(cluster: Any, name: str, shape: tuple[int, ...], split: Any = "whole") -> tuple[Any, ...]:
        placements: tuple[Any, ...] = cluster.layout(name, shape, split).placements
        return placements

    shared = parse_cluster("hsdp=2x4,tp=8")
    assert len(shared.ranks) == 64
    assert placed(shared, "l.0.q_proj.weight", (64, 64)) == (Replicate(), Shard(0, 8), Shard(0))
    assert placed(shared, "l.0.o_proj.weight", (64, 64)) == (Replicate(), Shard(0), Shard(1))
    assert placed(shared, "l.0.c_attn.weight", (64, 64), ("transposed", "whole")) == (
        Replicate(),
        Shard(0),
        Shard(1),
    )
    assert placed(shared, "norm.weight", (64,), None) == (Replicate(), Shard(0), Replicate())
    assert placed(shared, "l.0.mlp.gate.weight", (8, 64), None) == (Replicate(), Shard(0), Replicate())
    stack, split = "l.0.mlp.experts.gate_up_proj", ("stack", ("rows", 8, 8))
    assert placed(shared, stack, (8, 16, 64), split) == (Replicate(), Shard(0), Shard(1))
    assert placed(shared, "l.0.mlp.experts.down_proj", (8, 64, 8), "stack") == (Replicate(), Shard(0), Shard(2))
    apart = parse_cluster("hsdp=2x4,tp=8", "ddp=2,ep=8,fsdp=4")
    assert placed(apart, stack, (8, 16, 64), split) == (Replicate(), Shard(0), Shard(1))
    assert placed(apart, "l.0.q_proj.weight", (64, 64)) == placed(shared, "l.0.q_proj.weight", (64, 64))
    assert placed(parse_cluster("tp=2,fsdp=2"), "q_proj.weight", (8, 8)) == (Shard(0), Shard(0))


def run_plan(*options: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, options)], env={"COLUMNS": "200"})


def test_the_command_says_and_writes_who_owns_what(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"wire": 1e6}')
    arguments = ("--model", "nano", "--mesh", "hsdp=2x4", "--rates", tmp_path / "rates.json")
    shown, written = run_plan(*arguments), run_plan(*arguments, "--json")
    assert (shown.exit_code, written.exit_code) == (0, 0), shown.stderr + written.stderr
    assert "layers.*.mlp.down_proj" in shown.stdout
    report = json.loads(written.stdout)
    names = [part.name for part in weights_of("nano", parse_cluster("hsdp=2x4")) if part.matrices is not None]
    assert sorted(report["owners"]) == sorted(names)
    assert {owner for owners in report["owners"].values() for owner in owners} <= set(range(8))
    assert len(report["flops_by_rank"]) == 8
    assert report["flops_by_rank"][report["rank"]] == max(report["flops_by_rank"]) == report["counted"]["flops"]
    assert report["modelled"]["limited by"] == "network"
    assert "of its device" not in shown.stdout
    sent, seconds = report["counted"]["bytes sent"], report["modelled"]["seconds of the network"]
    begun = report["counted"]["collectives"] * report["rates"]["collective"]
    reached = report["counted"]["messages"] * report["rates"]["message"]
    assert list(seconds.values()) == [pytest.approx(sent / 1e6 + begun + reached)] * 2
    stored = ("weights", "gradients", "momentum", "AdamW's moments")
    stored_bytes = [report["counted"][f"bytes of {kind}"] for kind in stored]
    beside = report["modelled"]["bytes of NCCL's buffers"], report["modelled"]["bytes of buffers in the step"]
    assert report["modelled"]["bytes in total"] == sum(stored_bytes) + sum(beside)
    assert beside[0] == pytest.approx(4.34e9 - 1.06e9, abs=10)  # eight ranks
    rank = report["rank"]
    modelled = rf"Rank {rank}, modelled for the rates given\s+[─ ]+\s+limited by +network\s+time .* [\d.,]+ ms\s"
    assert re.search(modelled, shown.stdout)
    assert re.search(rf"Rank {rank}, counted\s+[─ ]+\s+matrices +\d", shown.stdout)


def test_a_rank_that_needs_more_memory_than_its_device_has_is_told(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"memory": 1e7, "flops": 1e18, "published": 1e12}')
    shown = run_plan("--model", "nano", "--mesh", "ddp=2", "--rates", tmp_path / "rates.json").stdout
    assert re.search(r"Rank 0 needs [\d.]+ MB even without activations, more than the 10.0 MB of its device", shown)
    assert re.search(r"limited by +host or device\s", shown)
    stored, adamw = (re.search(rf"stored in total{of} +([\d.]+) MB", shown) for of in ("", ", with AdamW for all"))
    assert stored is not None
    assert adamw is not None
    assert float(adamw[1]) > float(stored[1])


@pytest.mark.parametrize("width", [80, 200])
def test_the_tables_name_their_scope_and_fit_a_terminal(width: int) -> None:
    arguments = ["plan", "--model", "deepseek-v3", "--mesh", "fsdp=32,tp=8", "--experts", "ep=32,fsdp=8", "--rank", "3"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)}).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[0] == "Cluster: deepseek-v3 on fsdp=32,tp=8 (ranks: 256), rule muon"
    titles = [line.strip() for line, below in pairwise(shown) if set(below.replace(" ", "")) == {"─"}]
    assert [re.sub(" +", " ", title) for title in titles] == [
        "parameters shape matrices owners TFLOP 3 sends",
        "Cluster",
        "Rank 3, counted",
        "Rank 3, modelled for one H100",
    ]
    assert not [line for line in shown if re.match(r" \w+ *$", line) and "Cluster" not in line], (
        "a name broken in a word"
    )


def test_the_page_has_every_rate_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/planning.md").read_text().partition("| rate | unit ")[2]
    rates = {
        name: float(value) for name, value in re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+e-?\d+) \|", page, re.MULTILINE)
    }
    assert rates == pytest.approx(asdict(DeviceRates()), rel=0.02)


def test_a_rule_has_its_own_flops_and_memory() -> None:
    reports = {}
    for rule in ("muon", "soap"):
        result = run_plan("--model", "nano", "--mesh", "fsdp=4", "--rule", rule, "--json")
        assert result.exit_code == 0, result.stderr
        reports[rule] = json.loads(result.stdout)
    assert reports["soap"]["rule"] == "soap"
    assert sum(reports["soap"]["flops_by_rank"]) > 2 * sum(reports["muon"]["flops_by_rank"])
    assert reports["soap"]["counted"]["bytes of momentum"] > 4 * reports["muon"]["counted"]["bytes of momentum"]
    assert reports["soap"]["counted"]["bytes sent"] <= 1.5 * reports["muon"]["counted"]["bytes sent"]


WRONG = {
    "--model nano --mesh fsdp=2 --rule nothing": r"found 'nothing'; needed one of muon, .* points muonmesh\.rules",
    "--model nano --mesh fsdp": r"--mesh fsdp: found 'fsdp'; needed a whole number from 1 to 1,048,576. Write one or "
    r"more of ddp=8, fsdp=64, hsdp=8x32, tp=8, with commas between them$",
    "--model nano --mesh fsdp=99999999999999999999": r"needed a whole number from 1 to 1,048,576. Write one or more of",
    "--model nano --mesh fsdp64": r"found 'fsdp64'; needed axes of ddp, fsdp, hsdp, tp. Write .* fsdp=64,",
    "--model nano --mesh hsdp=8": r"found 'hsdp=8'; needed replicas x shards, two whole numbers from 1 to 1,048,576",
    "--model nano --mesh pp=2,fsdp=2": r"found 'pp=2'; .*Plan each pipeline stage by itself",
    "--model nano --mesh fsdp=2,hsdp=2x2": r"found two axes of fsdp; needed one of each",
    "--model nano --mesh fsdp=2000000": r"found 2,000,000 ranks; needed at most 1,048,576",
    "--model nano --mesh fsdp=2 --experts ep=2": r"--experts ep=2: found no experts in nano; .* Leave it out",
    "--model deepseek-v3 --mesh fsdp=4 --experts ep=2": r"found 2 ranks; needed 4, the ranks of --mesh fsdp=4",
    "--model nano --mesh fsdp=2 --rank 2": r"--rank 2: needed a rank of --mesh fsdp=2, below 2",
    "--model nothing --mesh fsdp=2": r"--model nothing: .*Needed a preset .*, the path of a",
    "--model nano --mesh fsdp=2 --rates none.json": r'none.json: .*needed rates such as {"flops": 4e14, ',
    "--model nano --mesh fsdp=2 --rates rates.json": r"a key of rates.json: found 'flop'; needed one of flops, ",
}


def test_a_budget_may_be_any_finite_number() -> None:
    result = run_plan("--model", "nano", "--mesh", "fsdp=2", "--memory-budget-mb", "1e308")
    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("line", WRONG)
def test_wrong_values_are_refused_with_what_to_write(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.json").write_text('{"flop": 1e12}')
    result = run_plan(*line.split())
    assert result.exit_code == 2
    assert re.search(WRONG[line], result.stderr), result.stderr
    assert result.stderr.startswith("muonmesh plan: ")


@pytest.mark.parametrize(
    ("model", "elements"),
    [("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496), ("llama-3.2-1b", 1_235_814_400)],
)
def test_known_models_have_the_published_number_of_parameters(model: str, elements: int) -> None:
    weights = weights_of(model, parse_cluster("fsdp=8"))
    assert sum(math.prod(weight.layout.shape) for weight in weights) == elements


def test_it_ends_in_one_sentence() -> None:
    shown = " ".join(run_plan("--model", "llama-3.1-8b", "--mesh", "fsdp=64").stdout.split())
    assert "elements 8.03B matrices 224 " in shown
    assert re.search(
        r"A step adds [\d.]+( to [\d.]+)? ms to forward and backward on rank \d+, limited by the \w+( or \w+)?; "
        r"torch\.optim\.Muon would add [\d,.]+ to [\d,.]+ ms\.$",
        shown,
    )


def test_it_says_why_bf16_weights_save_nothing_over_adamw_and_tells_long_times_in_seconds() -> None:
    shown = " ".join(run_plan("--model", "llama-3-70b", "--mesh", "fsdp=64", "--weights", "bf16").stdout.split())
    stored = re.findall(r"bytes stored in total(?:, with AdamW for all)? +([\d.]+ GB)", shown)
    assert len(stored) == 2
    assert stored[0] == stored[1]
    assert "With bf16 weights, momentum is fp32 and AdamW's two moments are bf16" in shown
    assert re.search(r"torch\.optim\.Muon would add [\d.]+ to [\d.]+ s\.$", shown)


@pytest.mark.slow
@pytest.mark.soak
def test_deepseek_v3_on_two_thousand_ranks() -> None:
    from muonmesh.tools.cli.plan_command import PlanRequest, planned

    request = PlanRequest(model="deepseek-v3", mesh="hsdp=8x32,tp=8", experts="ddp=8,ep=32,fsdp=8")
    report = planned(request)
    assert (report["ranks"], report["matrices"]) == (2048, 45154)
    assert report["elements"] == pytest.approx(671e9, rel=0.001)
    assert report["balance"]["busiest rank over mean"] == report["balance"]["no plan is below"]
