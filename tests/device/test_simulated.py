"""The whole step on a simulated device: real numbers, streams in any order, and no races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.removals import objections
from tests.device.simulated import Race, RaceError, SimulatedDevice
from tests.device.stepping import CASES, differing, simulated
from tests.device.timeline import Stream
from tests.support.interpreter import interpreting

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor", "ignore:.*without masters", "ignore:.*lr_scheduler"
)

QUICK = (
    "normuon",
    "masters, written",
    "masters on the host, written",
    "bf16 products",
    "int8",
    "scaler, state on the host",
    "missing gradients",
    "metrics, state on the host",
    "another device, state on the host",
)
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    with interpreting() as run:
        yield run


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 100))])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SOAK) for name in CASES])
def test_a_step_has_no_races_and_the_numbers_of_a_cpu(name: str, seed: int) -> None:
    """The order that the seed draws changes nothing."""
    outcome = simulated(CASES[name], seed)
    assert outcome.races == []
    assert outcome.waits == {}, "a step never waits for the device"
    assert differing(CASES[name], outcome) == []


def by_triton(name: str, seed: int) -> tuple[list[Race], dict[str, int], list[str]]:
    case = CASES[name]._replace(settings={**CASES[name].settings, "kernels": "triton"})
    outcome = simulated(case, seed)
    return outcome.races, outcome.waits, differing(CASES[name], outcome)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 4))])
@pytest.mark.parametrize("name", [n if n == "int8" else pytest.param(n, marks=SOAK) for n in CASES])
def test_kernels_in_triton_have_no_races_either(interpreter: Callable[..., Any], name: str, seed: int) -> None:
    assert interpreter(by_triton, name, seed) == ([], {}, [])


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"layout": "replicas"},
    "replicas that share their state": {"layout": "replicas", "settings": {"shard_state": True}},
    "sharded": {"layout": "sharded"},
}


def on_ranks(how: str, name: str, seed: int) -> tuple[list[Race], dict[str, int], list[str]]:
    case = CASES[name]
    settings = {**case.settings, **LAYOUTS[how].get("settings", {})}
    case = case._replace(settings=settings, layout=LAYOUTS[how]["layout"])
    outcome = simulated(case, 10 * seed + dist.get_rank())
    return outcome.races, outcome.waits, differing(case, outcome)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 3))])
@pytest.mark.parametrize(
    "name",
    [n if n in ("muon", "scaler", "one at a time", "all at once") else pytest.param(n, marks=SOAK) for n in CASES],
)
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SOAK)])
def test_ranks_exchange_without_races(workers, ranks: int, how: str, name: str, seed: int) -> None:
    assert workers(ranks).run(on_ranks, how, name, seed) == [([], {}, [])] * ranks


def test_a_wait_that_is_taken_out_is_reported_with_both_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    races = simulated(CASES["state on the host"], 0).races
    assert races
    assert any("offload.py" in race.first + race.second for race in races)


def copied(seed: int, *, waits: bool) -> Any:
    with SimulatedDevice(seed, eager=0.0) as device:
        x = torch.zeros(1000, device="cuda:0")
        x += 1
        host = torch.empty(1000, pin_memory=True)
        host.copy_(x, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        return host.sum().item(), device.races


def test_a_host_that_reads_too_early_is_an_error() -> None:
    assert copied(0, waits=True)[0] == 1000.0
    with pytest.raises(RaceError, match="pinned memory: one writes, the other reads"):
        copied(0, waits=False)


def test_memory_that_another_stream_still_reads_is_not_free() -> None:
    def sum_on_another_stream(*, recorded: bool) -> None:
        with SimulatedDevice(0, eager=0.0):
            other = torch.cuda.Stream()
            x = torch.ones(1000, device="cuda:0")
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x.sum()
            if recorded:
                x.record_stream(other)
            del x
            torch.zeros(1000, device="cuda:0")

    sum_on_another_stream(recorded=True)
    with pytest.raises(RaceError, match="which was freed in between"):
        sum_on_another_stream(recorded=False)


def test_a_race_is_told_with_both_lines() -> None:
    def add_on_another_stream() -> None:
        with SimulatedDevice():
            x = torch.zeros(4, device="cuda:0")
            with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
                x.add_(1)

    with pytest.raises(RaceError, match=r"zeros at .*test_simulated.*\n.*add_ at .*test_simulated"):
        add_on_another_stream()


@pytest.mark.soak
def test_what_is_taken_out_is_missed() -> None:
    """All that docs/internals/simulated.md says is not missed: copies for ranks and kernels, and Triton's guard."""
    unmissed = sorted(site.file for site, objected in objections() if not objected)
    assert unmissed == [
        "comm/to_owners.py",
        "numerics/kernels/pinned_copies.py",
        "numerics/kernels/triton_launch.py",
        "step/replicas.py",
    ]
