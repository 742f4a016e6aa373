"""CUDA graphs of batches on a simulated device, which captures, replays late and objects to what CUDA forbids."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.errors import LayoutError
from muonmesh.numerics.deflation import Deflation
from muonmesh.numerics.graphs import MOST, Graphs
from muonmesh.numerics.newton_schulz import Orthogonalizer
from tests.device import stepping
from tests.device.dry_run import dry_run
from tests.device.simulated import RaceError, SimulatedDevice
from tests.device.stepping import CASES, Case, Found, simulated
from tests.device.timeline import Graph, Stream
from tests.interpreter import interpreting

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor", "ignore:.*without masters", "ignore:.*lr_scheduler"
)

SOAK = pytest.mark.soak
QUICK = ("masters on the host",)
CUDA = torch.device("cuda:0")


class Watched(SimulatedDevice):
    """Writes down each operation as it is issued: its name, its operands, and whether it is only captured."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed, **options)
        self.issued: list[tuple[str, list[Any], bool]] = []

    def _queue(self, stream: Stream, run: Any, where: str, reads: Any, writes: Any) -> Any:
        self.issued.append((where, [*reads, *writes], stream.capturing is not None))
        return super()._queue(stream, run, where, reads, writes)

    def told(self, *, captured: bool) -> list[tuple[str, list[Any]]]:
        """Return what was captured, or else run, without the copies of `graphs.py` in and out."""
        copies = "copy_ at numerics/graphs.py"
        return [(w, parts) for w, parts, c in self.issued if c == captured and not w.startswith(copies)]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    with interpreting() as run:
        yield run


def made(rows: int, cols: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Orthogonalizer:
    asked = {"coefficients": "polar_express", "steps": None, "method": "auto", "kernels": "torch", **settings}
    return Orthogonalizer.of(rows, cols, dtype=dtype, device=CUDA, **asked)


def alike(a: list[tuple[str, list[Any]]]) -> list[Any]:
    """Operations without addresses."""
    return [(where.split(" at ")[0], [part[1:] for part in parts]) for where, parts in a]


def addresses(a: list[tuple[str, list[Any]]]) -> list[Any]:
    return [[(id(part.block), *part[1:]) for part in parts] for _, parts in a]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=SOAK) for seed in range(3, 300))])
def test_what_is_captured_is_the_same_at_every_step(seed: int) -> None:
    """Random batches: the same operations on the same addresses, only the graph's own memory, and the same bits.

    Values from tiny to not finite, in other memory at each call; one call has no graph to compare with.
    """
    draw = random.Random(seed)
    rows, cols, batch = draw.randint(1, 24), draw.randint(1, 40), draw.randint(1, 4)
    dtype = draw.choice([torch.float32, torch.float64])
    method = draw.choice(["standard", "gram"])
    of = made(rows, cols, dtype, method=method, steps=draw.choice([None, 1, 2, 4]))
    overwrite = draw.random() < 0.5
    generator = torch.Generator().manual_seed(seed)
    with Watched(seed, devices=1) as device:
        graphs, expected, found, kept = Graphs(CUDA), [], [], []
        captured, ran = [], []
        for _ in range(6):
            host = torch.randn(batch, rows, cols, generator=generator, dtype=torch.float64)
            host[-1] *= draw.choice([1.0, 1e-30, 0.0, 1e20, float("nan")])
            x = host.to(CUDA, dtype)
            kept.append(torch.zeros(draw.randint(1, 3000), device=CUDA))  # so that memory moves
            expected.append(of(x.clone()).cpu())
            device.issued.clear()
            out = torch.empty_like(x)
            assert of(x, out=out, overwrite=overwrite, graphs=graphs) is out
            captured += device.told(captured=True)
            ran.append(device.told(captured=False))
            found.append(out.cpu())
        (own,) = graphs._batches.values()
        blocks = {id(device._part(tensor).block) for tensor in own.given}
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert len(captured) > 3
    assert alike(captured) == alike(ran[1]), "the call before it issued the same operations"
    for replayed in ran[2:]:
        assert alike(replayed) == alike(captured)
        assert addresses(replayed) == addresses(captured)
    for _, parts in captured:
        for part in parts:
            assert part.block.pool is own._memory._pool or id(part.block) in blocks


def with_graphs(name: str, seed: int, steps: int, **settings: Any) -> tuple[Found, Found, int]:
    """Return what steps find without graphs and with them, and how many were replayed."""
    case, replays, replay = CASES[name], [0], Graph.replay
    case = case._replace(settings={**case.settings, **settings})
    before = stepping.STEPS

    def counted(graph: Graph) -> None:
        replays[0] += 1
        replay(graph)

    stepping.STEPS, Graph.replay = before if case.scaled else steps, counted  # type: ignore[method-assign]
    try:
        plain = simulated(case, seed)
        graphed = simulated(case._replace(settings={**case.settings, "cuda_graphs": True}), seed)
    finally:
        stepping.STEPS, Graph.replay = before, replay  # type: ignore[method-assign]
    return plain, graphed, replays[0]


def different(plain: Found, graphed: Found) -> list[str]:
    assert plain.tensors.keys() == graphed.tensors.keys()
    return [key for key, value in plain.tensors.items() if not torch.equal(value, graphed.tensors[key])]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 20))])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SOAK) for name in CASES])
def test_a_step_with_graphs_has_the_bits_of_one_without(name: str, seed: int) -> None:
    plain, graphed, replays = with_graphs(name, seed, 5)
    assert graphed.races == []
    assert graphed.waits == {}
    assert different(plain, graphed) == []
    assert (replays > 0) == (name not in ("scion_sign", "scion_row_norm")), "these two orthogonalize nothing"


def by_triton(name: str) -> tuple[list[Any], list[str], int]:
    plain, graphed, replays = with_graphs(name, 0, 4, kernels="triton")
    return graphed.races, different(plain, graphed), replays


def batches_by_triton(rows: int, cols: int, method: str) -> int:
    with SimulatedDevice(0):
        graphs, of = Graphs(CUDA), made(rows, cols, torch.bfloat16, kernels="triton", method=method, steps=3)
        for _ in range(4):
            x, out = torch.randn(2, rows, cols).to(CUDA, torch.bfloat16), torch.empty(2, rows, cols).to(CUDA).bfloat16()
            assert torch.equal(of(x, out=out, graphs=graphs).cpu(), of(x).cpu())
        return sum(batch._graph is not None for batch in graphs._batches.values())


@pytest.mark.soak
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_kernels_in_triton_are_captured_too(interpreter: Callable[..., Any], method: str) -> None:
    assert interpreter(batches_by_triton, 5, 9, method) == 1


@pytest.mark.soak
@pytest.mark.parametrize("name", ["muon", "normuon", "bf16"])
def test_steps_by_triton_are_captured_too(interpreter: Callable[..., Any], name: str) -> None:
    races, other, replays = interpreter(by_triton, name)
    assert (races, other) == ([], [])
    assert replays > 3


def on_ranks(layout: str, seed: int) -> tuple[list[Any], list[str], int]:
    CASES["on ranks"] = Case(layout=layout)
    plain, graphed, replays = with_graphs("on ranks", 10 * seed + dist.get_rank(), 5)
    return graphed.races, different(plain, graphed), replays


@pytest.mark.parametrize("layout", ["replicas", pytest.param("sharded", marks=SOAK)])
def test_buckets_in_flight_do_not_overwrite_each_other(workers: Any, layout: str) -> None:
    for races, other, replays in workers(2).run(on_ranks, layout, 0):
        assert (races, other) == ([], [])
        assert replays > 3


# ---------------------------------------------------------------- what it must not do


def run_four_times(call: Callable[..., Any], **options: Any) -> list[float]:
    with SimulatedDevice(3, **options):
        graphs, sums = Graphs(CUDA), []
        for step in range(4):
            x = torch.full((1, 2, 3), float(step), device=CUDA)
            out = torch.empty_like(x)
            if not graphs.run(call, [x, out], "key"):
                call(x, out)
            sums.append(out.sum().item())
    return sums


def test_a_call_sees_what_it_is_given_now() -> None:
    assert run_four_times(lambda x, out: torch.mul(x, 2, out=out)) == [0.0, 12.0, 24.0, 36.0]


def test_without_the_copies_the_numbers_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_is_alias_of", lambda a, b: True)
    assert run_four_times(lambda x, out: torch.mul(x, 2, out=out), raises=False)[2:] != [24.0, 36.0]


def test_a_host_read_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        run_four_times(lambda x, out: out.fill_(x.sum().item()))


def test_a_copy_from_the_host_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        run_four_times(lambda x, out: out.copy_(torch.ones(1, 2, 3).pin_memory(), non_blocking=True))


def test_a_wait_and_an_event_cannot_be_captured() -> None:
    for wait in (lambda: torch.cuda.synchronize(), lambda: torch.cuda.Event().record()):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            run_four_times(lambda x, out, wait=wait: (out.copy_(x), wait()))


def test_memory_that_is_not_kept_cannot_be_used_again() -> None:
    """An allocation outside the pool: what a graph reads is freed after it was captured."""
    outside: list[Tensor] = []

    def call(x: Tensor, out: Tensor) -> None:
        torch.add(x, outside[0], out=out)

    def run() -> None:
        with SimulatedDevice(0):
            graphs = Graphs(CUDA)
            for _ in range(5):
                outside[:] = [torch.ones(1, 2, 3, device=CUDA)]
                x = torch.zeros(1, 2, 3, device=CUDA)
                graphs.run(call, [x, torch.empty_like(x)], "key")

    with pytest.raises(RaceError, match="of a graph, which was freed"):
        run()


def test_memory_of_a_graph_is_given_to_nobody_else() -> None:
    def run(*, kept: bool) -> float:
        with SimulatedDevice(1, eager=1.0) as device:
            graphs, other, total = Graphs(CUDA), torch.cuda.Stream(), 0.0
            for _ in range(4):
                x, out = torch.ones(1, 40, 30, device=CUDA), torch.empty(1, 40, 30, device=CUDA)
                graphs.run(lambda x, out: torch.mul(x + x, 2, out=out), [x, out], "key")
                total = out.sum().item()
                (batch,) = graphs._batches.values() if len(graphs) else (None,)
                if batch is not None and batch._graph is not None:
                    for block in device._free:
                        if block.pool is not None and not kept:
                            block.pool, block.stream = None, other
                    with torch.cuda.stream(other):
                        torch.zeros(1, 40, 30, device=CUDA)
        return total

    assert run(kept=True) == 4 * 1200.0
    with pytest.raises(RaceError, match="device memory"):
        run(kept=False)


def test_a_graph_belongs_to_one_stream() -> None:
    """On another stream a batch gets a graph of its own; one graph on two would race."""

    def run(*, apart: bool) -> int:
        with SimulatedDevice(0, eager=0.0):
            graphs, of, other = Graphs(CUDA), made(4, 6), torch.cuda.Stream()
            x = torch.randn(1, 4, 6).to(CUDA)
            for _ in range(3):
                of(x, graphs=graphs)
            other.wait_stream(torch.cuda.current_stream())
            if not apart:
                (key, batch), *_ = graphs._batches.items()
                graphs._batches[(*key[:-1], other)] = batch
            with torch.cuda.stream(other):
                of(x, graphs=graphs)
                of(x, graphs=graphs)
            of(x, graphs=graphs)
            torch.cuda.synchronize()
        return len(graphs)

    assert run(apart=True) == 2
    with pytest.raises(RaceError, match="one writes, the other"):
        run(apart=False)


# ---------------------------------------------------------------- what the optimizer says


def test_batches_take_turns_in_the_memory_of_the_largest() -> None:
    """No more of them than said have a graph, nor has a larger one that comes later, and all have the same bits."""
    with SimulatedDevice(0) as device:
        graphs, kinds = Graphs(CUDA), [made(4, cols, steps=1) for cols in (60, 600, 6, 70, 50, 40)]

        def step(some: list[Orthogonalizer]) -> None:
            for of in some:
                x = torch.randn(2, 4, of.cols).to(CUDA)
                assert torch.equal(of(x.clone(), graphs=graphs).cpu(), of(x).cpu())

        for _ in range(4):
            step(kinds[:3])
        later = made(4, 6000, steps=1)
        for _ in range(3):
            step([later])
        assert len(graphs) == 3
        for _ in range(3):
            step(kinds)
        assert len(graphs) == MOST
        (memory,) = graphs._memory.values()
        assert memory.long.nbytes == 2 * -(-2 * 4 * 600 * 4 // 512) * 512
        pools = {id(b): b.storage.nbytes() for b in device._free if b.pool is not None}
        assert len({batch._graph for batch in graphs._batches.values()}) == MOST
        assert graphs.bytes == memory.long.nbytes + sum(pools.values())
        assert sum(pools.values()) < 4 * 1024 + 2 * 2 * 4 * 600 * 4, "of the largest, not of all four"


def test_calls_that_start_something_else_have_another_graph() -> None:
    """By shape, by dtype (fp32 is not cut to bf16), and by whether the matrices may be overwritten."""
    of = made(4, 6, steps=1)
    changes: list[dict[str, Any]] = [{"dtype": torch.bfloat16}, {"rows": 3}, {"overwrite": True}]
    for change in changes:
        with SimulatedDevice(0):
            graphs = Graphs(CUDA)
            for _ in range(4):
                for asked in (change, {}):
                    rows = asked.get("rows", 2)
                    x = torch.randn(rows, 4, 6).to(CUDA, asked.get("dtype", torch.float32))
                    before, expected = x.cpu(), of(x).cpu()
                    overwrite = "overwrite" in asked
                    key = of.graph_key(x.shape, x.dtype, overwrite=overwrite)
                    if (memory := graphs.memory(*key)) is not None:
                        x = memory[0].copy_(x)
                    assert torch.equal(of(x, overwrite=overwrite, graphs=graphs).cpu(), expected)
                    assert overwrite or torch.equal(x.cpu(), before)
            assert len(graphs) == 2


def test_graphs_are_nobody_else_s() -> None:
    """A copy of an optimizer, a second one, and one with another group capture anew; what is deleted is freed."""
    with SimulatedDevice(0) as device:
        parameter, optimizer = on_device(cuda_graphs=True)
        beside, other = on_device(cuda_graphs=True)

        def step(*some: mm.Muon) -> None:
            for _ in range(3):
                for each in some:
                    each.step()

        step(optimizer, other)
        twin = copy.deepcopy(optimizer, {id(device._fake): device._fake})
        (copied,) = twin.param_groups[0]["params"]
        copied.grad = parameter.grad.clone()
        assert twin.explain().graphs == 0
        step(optimizer, twin)
        assert torch.equal(copied.cpu(), parameter.cpu())
        kept = [weakref.ref(memory) for each in (optimizer, other, twin) for memory in graphs_of(each)._memory.values()]
        assert len(kept) == 3
        more = nn.Parameter(torch.randn(6, 20).to(CUDA))
        more.grad = torch.randn(6, 20).to(CUDA)
        optimizer.add_param_group({"params": [more], "param_names": ["more"], "algorithm": "muon"})
        step(optimizer)
        assert optimizer.explain().graphs == 2
        assert kept[0]() is None, "those of the plan before"
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        step(optimizer)
        del optimizer, other, twin, beside, state
        assert [ref() for ref in kept] == [None] * 3
        torch.cuda.synchronize()
        assert not device.races


def test_a_cpu_has_no_graphs() -> None:
    optimizer = mm.Muon(nn.Linear(4, 6, bias=False).named_parameters(), process_group="local", cuda_graphs=True)
    with pytest.raises((ValueError, LayoutError), match=r"cuda_graphs: .*cpu.*Leave cuda_graphs out"):
        optimizer.explain()


def graphs_of(optimizer: mm.Muon) -> Graphs:
    connected = optimizer._runtime.connected
    assert connected is not None
    assert connected.graphs is not None
    return connected.graphs


def on_device(**settings: Any) -> tuple[nn.Parameter, mm.Muon]:
    parameter = nn.Parameter(torch.randn(8, 12).to(CUDA))
    parameter.grad = torch.randn(8, 12).to(CUDA)
    settings = {"process_group": "local", "compute_dtype": torch.float32, "kernels": "torch", **settings}
    return parameter, mm.Muon([("w", parameter)], lr=0.1, **settings)


def test_explain_tells_the_memory() -> None:
    with SimulatedDevice(0):
        _, optimizer = on_device(cuda_graphs=True)
        assert "CUDA graphs of 0 batches, at most 4, keep 0 MB in addition to the budget" in str(optimizer.explain())
        for _ in range(3):
            optimizer.step()
        told = optimizer.explain()
        assert told.graphs == 1
        assert told.graph_bytes >= 2 * 8 * 12 * 4
        assert on_device()[1].explain().graphs is None


def test_a_step_that_is_captured_itself_is_refused() -> None:
    """It would repeat its learning rate, and read tables from memory that the host has used for others."""
    with SimulatedDevice(0):
        _, optimizer = on_device()
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=r"step\(\): found in a CUDA graph capture"):
                optimizer.step()
            graph.capture_end()
        optimizer.step()


def test_orthogonalize_can_be_captured_by_its_caller() -> None:
    with SimulatedDevice(0):
        x, again = torch.randn(2, 6, 9).to(CUDA), torch.randn(2, 6, 9).to(CUDA)
        out = torch.empty_like(x)
        for _ in range(3):
            mm.orthogonalize(x, dtype=torch.float32, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            mm.orthogonalize(x, dtype=torch.float32, out=out)
            graph.capture_end()
        x.copy_(again)
        graph.replay()
        assert torch.equal(out.cpu(), mm.orthogonalize(again, dtype=torch.float32).cpu())


@pytest.mark.parametrize(
    "coefficients", ["deflated", "aol", *(pytest.param(some, marks=SOAK) for some in ("quintic", "deepseekv4"))]
)
def test_sets_that_decompose_are_not_captured(coefficients: str) -> None:
    """Solvers may read numbers on the host and have memory of their own."""
    with SimulatedDevice(0):
        graphs, of = Graphs(CUDA), made(Deflation.from_rows, 400, coefficients=coefficients)
        for _ in range(4):
            x = torch.randn(1, Deflation.from_rows, 400).to(CUDA)
            assert torch.equal(of(x, graphs=graphs).cpu(), of(x).cpu())
        assert len(graphs) == (coefficients != "deflated")


def test_a_dry_run_knows_graphs() -> None:
    model = nn.Sequential(*(nn.Linear(64, 256, bias=False, device="meta") for _ in range(3)))

    def run(**settings: Any) -> Any:
        return dry_run(model, lambda m: mm.Muon(m.named_parameters(), process_group="local", **settings), steps=3)

    plain, graphed = run(), run(cuda_graphs=True)
    assert plain.launches - graphed.launches > 10, "those of a graph are not started one by one"
