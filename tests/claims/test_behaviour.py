"""What several ranks do with missing and zero gradients, mistakes on one of them, and changing parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import json
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.numerics import kernels
from muonmesh.numerics.kernels import auto_takes, compiled, threads
from muonmesh.step.runtime import Driver
from tests.support import emulated, gathered, models, pretended, problem
from tests.support.on_ranks import on_ranks
from tests.support.problem import SETTINGS, gradients, groups, hold, initial, placed_like

COVERS = (
    "comm.exchange.Exchange",
    "comm.same_plan.insist",
    "step.connection.connect",
    "step.preflight.preflight",
    "step.planning.widened",
)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


# ------------------------------------------------------------------ zero and missing gradients


@pytest.mark.parametrize("wait", [True, False], ids=["host-waits", "host-does-not-wait"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
@on_ranks(2)
def test_zero_and_missing_gradients_bit_for_bit(layout: str, wait: bool) -> None:
    """Without waiting, as on CUDA, every write is masked by the flags on the device."""

    def prepare(optimizer: mm.Muon) -> None:
        optimizer._runtime.driver = Driver(wait)

    *_, last = problem.steps(layout, 4, problem.initial(), problem.zeroed, prepare)
    assert problem.differing(problem.result(*last), problem.alone(4, problem.zeroed)) == []


@on_ranks(2)
def test_a_gradient_that_is_zero_on_one_rank_only_counts_everywhere() -> None:
    """FSDP2: the non-zero gradients lie in one rank's shard only; both ranks must take the step."""
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh(), [Shard(0)]))
    optimizer = mm.Muon([weight], lr=0.1)
    gradient = torch.zeros(8, 6)
    gradient[6:] = torch.randn(2, 6)
    weight.grad = distribute_tensor(gradient, mesh(), [Shard(0)])
    optimizer.step()
    assert (problem.whole(weight) != 1).all()


HOSTS = {"waits": True, "does-not-wait": False}
"""Whether the host waits for the flags."""


@mm.register_rule("test-sum-of-gradients")
@dataclasses.dataclass(frozen=True)
class SumOfGradients(mm.ElementwiseRule):
    def keeps(self) -> tuple[str, ...]:
        return ("sum",)

    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return state["sum"].add_(gradient) / count


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("algorithm", ["muon", "adamw", "test-sum-of-gradients"])
@on_ranks(2)
def test_a_missing_shard_counts_as_zero(algorithm: str, host: str) -> None:
    """Step a matrix in two shards, one of which has no gradient in some steps; compare it with one process."""
    value = torch.randn(8, 6)
    weight = nn.Parameter(distribute_tensor(value, mesh(), [Shard(0)], src_data_rank=None))
    twin = nn.Parameter(value.clone())
    sharded, single = (
        mm.Muon([{"params": [p], "algorithm": algorithm}], lr=0.1, compute_dtype=torch.float32, process_group=group)
        for p, group in ((weight, None), (twin, "local"))
    )
    sharded._runtime.driver = Driver(HOSTS[host])
    for step in range(5):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        missing = step in (0, 3, 4)
        gradient[4:] *= not missing
        twin.grad = None if step == 2 else gradient  # then no rank has one, and nothing moves
        weight.grad = None if step == 2 or (missing and dist.get_rank()) else problem.placed_like(weight, gradient)
        metrics, expected = ((optimizer.step(), optimizer.metrics())[1] for optimizer in (sharded, single))
    results = [gathered.whole({"": p, **o.state[p]}) for o, p in ((sharded, weight), (single, twin))]
    assert problem.differing(*results) == []
    assert [name for name in expected if float(metrics[name]) != pytest.approx(expected[name])] == []


@on_ranks(4)
def test_a_whole_gradient_of_a_sharded_parameter_is_cut() -> None:
    """Tensor parallelism leaves the gradient of a vocabulary-parallel embedding whole on every rank."""
    weight, twin = (nn.Parameter(distribute_tensor(torch.ones(9, 6), mesh(), [Shard(0)])) for _ in range(2))
    gradient = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    weight.grad = distribute_tensor(gradient, mesh(), [Replicate()], src_data_rank=None)
    twin.grad = distribute_tensor(gradient, mesh(), [Shard(0)], src_data_rank=None)
    for parameter in (weight, twin):
        mm.Muon([parameter], lr=0.1).step()
    assert torch.equal(problem.whole(weight), problem.whole(twin))
    assert weight.grad.placements == (Replicate(),)


def own_nothing() -> tuple[int, bool]:
    weight = nn.Parameter(distribute_tensor(torch.ones(1, 6), mesh(), [Shard(0)]))
    optimizer = mm.Muon([weight], lr=0.1)
    weight.grad = distribute_tensor(torch.ones(1, 6), mesh(), [Shard(0)])
    for _ in range(2):
        optimizer.step()
    return optimizer.counts.orthogonalized, bool((problem.whole(weight) < 1).all())


def test_ranks_that_hold_and_own_nothing_take_part(workers) -> None:
    outcomes = workers(4).run(own_nothing)
    assert sorted(count for count, _ in outcomes) == [0, 0, 0, 1]
    assert all(moved for _, moved in outcomes)


# ------------------------------------------------------------------ mistakes on one rank


def products_of_one_rank(products_asked_for: str, without: int) -> tuple[list[str], list[str]]:
    """Step with a package that has no library of products on one rank; return warnings and differences.

    What differs is compared with torch's products everywhere.
    """
    path, gains, amx = compiled.__file__, dict(kernels._GAIN), torch.cpu._is_amx_tile_supported
    kernels._GAIN.update(dict.fromkeys(("neon", "bf16", *gains), range(1, 512)))  # whatever this processor is
    torch.cpu._is_amx_tile_supported = lambda: False
    results = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for products, lacks in ((products_asked_for, without), ("torch", -1)):
                compiled.__file__ = "/nowhere/compiled.py" if dist.get_rank() == lacks else path
                compiled.library.cache_clear()
                auto_takes.cache_clear()
                weights = [torch.randn(60 + n, 130, generator=torch.Generator().manual_seed(n)) for n in range(4)]
                shards = [distribute_tensor(weight, mesh(), [Shard(0)], src_data_rank=None) for weight in weights]
                named = [(f"w{n}", nn.Parameter(shard)) for n, shard in enumerate(shards)]
                optimizer = mm.Muon(named, lr=0.1, kernels=products)
                for _ in range(2):
                    for _, parameter in named:
                        parameter.grad = parameter.detach().sin()
                    optimizer.step()
                copy.deepcopy(optimizer)
                results.append({name: parameter.full_tensor() for name, parameter in named})
    finally:
        compiled.__file__, torch.cpu._is_amx_tile_supported = path, amx
        kernels._GAIN.clear()
        kernels._GAIN.update(gains)
        compiled.library.cache_clear()
        auto_takes.cache_clear()
    messages = [str(warning.message) for warning in caught if "kernels" in str(warning.message)]
    return messages, problem.differing(*results)


def test_ranks_take_the_products_that_all_of_them_have(workers, products: None) -> None:
    """Torch's, and rank 0 says so once. Where all have ours, all take ours, which have other bits."""
    for without in (0, 1):
        (messages, differing), (other, differing_there) = workers(2).run(products_of_one_rank, "auto", without)
        assert (differing, differing_there, other) == ([], [], [])
        assert len(messages) == 1
        assert "all ranks use torch's products. Install the same wheel" in messages[0]
    for messages, differing in workers(2).run(products_of_one_rank, "auto", -1):
        assert messages == []
        assert differing


@pytest.mark.parametrize("other", [pytest.param(0, marks=pytest.mark.soak), 1])
@pytest.mark.parametrize("variant", ["avx2", "amx"])
def test_ranks_on_different_processors_hold_the_same_weights(
    tmp_path: Path, products: None, variant: str, other: int
) -> None:
    """One rank has AVX2 alone: in torch, in oneDNN and in the products in C. Or torch says that it has AMX."""
    running = []
    for rank in range(2):
        environment = pretended.environment(variant if rank == other else "no-amx")
        command = [sys.executable, "-m", "tests.support.processors", str(tmp_path / "store"), str(rank)]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    reports = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert [rank["differing"] for rank in reports] == [[], []]
    assert variant == "amx" or not reports[other]["bf16"]
    assert variant == "avx2" or reports[0]["takes"] != reports[1]["takes"]
    if reports[0]["takes"] != reports[1]["takes"]:  # else the whole processor has AVX2 alone
        assert [len(rank["told"]) for rank in reports] == [1, 0]
        assert "all ranks use torch's products" in reports[0]["told"][0]
        assert [rank["not torch's"] for rank in reports] == [[], []]


@on_ranks(2, timeout=20)
def test_ranks_with_another_order_of_sums_are_an_error_on_every_rank(emulated_amx: Path) -> None:
    with emulated.using(emulated_amx):
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh(), [Shard(0)]))
        optimizer = mm.Muon([weight], lr=0.1, kernels=("compiled", "amx")[dist.get_rank()])
        weight.grad = torch.zeros_like(weight)
        with pytest.raises(mm.PlanError, match=r"(?s)(?=.*kernels compiled 1).*kernels amx 2"):
            optimizer.step()


def test_products_that_one_rank_lacks_are_an_error_on_every_rank_where_asked_for(workers, products) -> None:
    for outcome in workers(2).run_expecting_errors(products_of_one_rank, "compiled", 1, timeout=20):
        assert "no products.so in the package" in outcome.message
        assert outcome.seconds < 10


@on_ranks(2, timeout=20)
def test_plain_matrices_on_several_ranks_need_a_process_group() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = mm.Muon([("w", weight)], lr=0.1)
    weight.grad = torch.ones(4, 4)
    with pytest.raises(mm.LayoutError) as error:
        optimizer.step()
    assert str(error.value) == (
        "w: This parameter is a plain tensor while 2 ranks run, "
        "and nothing says which ranks hold the same parameter. "
        "If the model was sharded after this optimizer was made, make the optimizer after it. "
        'Under DDP, pass the wrapped model to from_model, or write process_group="world", as you do if your loop '
        "averages the gradients of all ranks. "
        'If every rank trains its own copy, write process_group="local". '
        "If some ranks share it, pass their ProcessGroup. "
        "If it is a shard, make it a DTensor (fully_shard), or declare it: layouts={'w': (mesh, placements)}. "
        "Leave out ZeroRedundancyOptimizer: ranks share the work, and with shard_state=True the state"
    )


@on_ranks(2)
def test_a_process_group_without_this_rank_is_refused() -> None:
    group = dist.new_group([0])
    weight = nn.Parameter(torch.ones(4, 4))
    if dist.get_rank() == 0:
        optimizer = mm.Muon([weight], process_group=group)
        weight.grad = torch.ones(4, 4)
        optimizer.step()
    else:
        with pytest.raises(ValueError, match=r"process_group: found .*needed"):
            mm.Muon([weight], process_group=group)


@on_ranks(2)
def test_a_process_group_must_be_given_again_after_unpickling() -> None:
    model, _ = problem.hold("ddp", problem.initial())
    optimizer = mm.Muon(problem.groups(model), process_group=dist.group.WORLD, **problem.SETTINGS)
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    with pytest.raises(ValueError, match=r"optimizer\.process_group = group"):
        other.step()
    other.process_group = dist.group.WORLD
    third, copied = copy.deepcopy((model, optimizer))  # a copy shares the group
    pairs = ((model, optimizer), (twin, other), (third, copied))
    for m, o in pairs:
        for name, gradient in problem.gradients(0).items():
            m.get_parameter(name).grad = gradient.clone()
        o.step()
    expected, *rest = (problem.result(*pair) for pair in pairs)
    assert [name for result in rest for name in problem.differing(result, expected)] == []


# ------------------------------------------------------------------ partial gradients, swapped parameters


@on_ranks(2)
def test_parameters_swapped_after_construction() -> None:
    """Accelerate's FSDP2 builds the optimizer first and then swaps only param_group["params"]."""
    model, _ = problem.hold("local", problem.initial())
    optimizer = mm.Muon(problem.groups(model), **problem.SETTINGS)
    position = {id(p): name for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh())
    for group in optimizer.param_groups:
        group["params"] = [model.get_parameter(position[id(p)]) for p in group["params"]]
    twin, group = problem.hold("fsdp", problem.initial())
    other = mm.Muon(problem.groups(twin), process_group=group, **problem.SETTINGS)
    for m, o in ((model, optimizer), (twin, other)):
        for step in range(2):
            for name, gradient in problem.gradients(step).items():
                m.get_parameter(name).grad = problem.placed_like(m.get_parameter(name), gradient)
            o.step()
    assert problem.differing(problem.result(model, optimizer), problem.result(twin, other)) == []


@on_ranks(2)
def test_explain_does_not_communicate() -> None:
    model, group = problem.hold("fsdp", problem.initial())
    optimizer = mm.Muon(problem.groups(model), process_group=group, **problem.SETTINGS)
    assert dist.get_rank() or "Shard(0)×2" in str(optimizer.explain())


def metrics_of(layout: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for _, optimizer in problem.steps(layout, 2, problem.initial()):
        figures = optimizer.metrics()
    return figures


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_metrics_count_every_element_and_every_matrix_once(workers, layout: str) -> None:
    alone = metrics_of("local")
    assert len(alone) == 8
    for figures in workers(2).run(metrics_of, layout):
        assert figures == pytest.approx(alone, rel=1e-6)


# ------------------------------------------------------------------ real models


def by_fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh(), **options)
    return model


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": by_fsdp2,
    "fsdp2, kept": functools.partial(by_fsdp2, reshard_after_forward=False),
    "fsdp2, mixed": functools.partial(by_fsdp2, mp_policy=MIXED),
    "fsdp2, mixed, kept": functools.partial(by_fsdp2, mp_policy=MIXED, reshard_after_forward=False),
    "fsdp2 on dim 1": functools.partial(by_fsdp2, shard_placement_fn=lambda p: Shard(p.ndim - 1)),  # where it is even
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_a_wrapped_llama_is_that_of_one_process(wrapper: str) -> None:
    """Train a Llama, and the same alone with the gradients that the ranks have made."""
    model, twin = models.build("llama"), models.build("llama")
    wrapped = WRAPPERS[wrapper](model)
    optimizer = mm.from_model(wrapped, lr=0.02, process_group="world" if wrapper == "ddp" else None)
    alone = mm.from_model(twin, lr=0.02, process_group="local")
    assert [g["param_names"] for g in optimizer.param_groups] == [g["param_names"] for g in alone.param_groups]
    for step in range(3):
        tokens = models.tokens(10 * step + dist.get_rank(), 2, 16)
        if wrapper == "ddp":
            with wrapped.no_sync():  # two micro-batches, one orthogonalization
                wrapped(input_ids=tokens.flip(1), labels=tokens.flip(1)).loss.backward()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = problem.whole(p.grad).to(q.dtype)
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
    assert ("Shard(1)" in str(optimizer.explain())) == (wrapper == "fsdp2 on dim 1")
    assert problem.differing(problem.result(model, optimizer), problem.result(twin, alone)) == []


def two_groups() -> tuple[list[str], int]:
    """Two pairs of replicas that train different models: each pair is on its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = []
    for group in (groups[rank // 2], "local"):
        model, _ = problem.hold("local", problem.initial(seed=rank // 2))
        optimizer = mm.Muon(problem.groups(model), process_group=group, **problem.SETTINGS)
        for step in range(2 + rank // 2):  # and for different times
            for name, gradient in problem.gradients(step + rank // 2).items():
                model.get_parameter(name).grad = gradient
            optimizer.step()
            if group != "local":
                orthogonalized = optimizer.counts.orthogonalized
        results.append(problem.result(model, optimizer))
    return problem.differing(*results), orthogonalized


def test_groups_that_share_nothing_do_not_wait_for_each_other(workers) -> None:
    outcomes = workers(4).run(two_groups)
    assert [differing for differing, _ in outcomes] == [[]] * 4
    counts = [orthogonalized for _, orthogonalized in outcomes]
    assert counts[0] + counts[1] == counts[2] + counts[3]
    assert min(counts) > 0


def buffer_addresses() -> dict[str, int]:
    """Where the buffers of a step are, by role."""
    roles = {role: views[None] for (role, _), views in vars(threads._thread_local)["scratch"].items()}
    assert {"gather.send 0", "scatter.receive 1"} <= roles.keys()
    return {role: buffer.data_ptr() for role, buffer in roles.items()}


@on_ranks(2)
def test_one_bucket_travels_while_another_computes_and_buffers_are_reused() -> None:
    """What happens in which order, and whether the buffers of one step serve the next."""
    model, group = problem.hold("fsdp", problem.initial())
    optimizer = mm.Muon(problem.groups(model), process_group=group, memory_budget_mb=0.08, **problem.SETTINGS)
    for name, gradient in problem.gradients(0).items():
        model.get_parameter(name).grad = problem.placed_like(model.get_parameter(name), gradient)
    optimizer.step()
    exchange = optimizer._runtime.planned.exchange
    owners = exchange
    buffers = buffer_addresses()
    events: list[str] = []
    run = exchange.run

    def watched(work: Any) -> Any:
        step_elementwise, orthogonalize, numbers = work.step_elementwise, owners._orthogonalize, itertools.count()

        def computed(*batches: Any) -> Any:
            updates = orthogonalize(*batches)
            events.append(f"computed {next(numbers)}")
            return updates

        work.step_elementwise, owners._orthogonalize = lambda: (events.append("adamw 0"), step_elementwise()), computed
        return run(work)

    exchange.run = watched
    for method in ("_gather", "_compute", "_scatter", "_receive"):
        original = getattr(owners, method)

        def logged(bucket: Any, *args: Any, _name: str = method, _call: Any = original) -> Any:
            if bucket is not None:  # no stage before the first
                events.append(f"{_name[1:]} {getattr(bucket, 'stage', bucket).number}")
            return _call(bucket, *args)

        setattr(owners, method, logged)
    optimizer.step()
    last = max(int(event.split()[1]) for event in events)
    assert last >= 2
    for number in range(last):
        assert events.index(f"gather {number + 1}") < events.index(f"compute {number}")
        assert events.index(f"scatter {number}") < events.index(f"compute {number + 1}")
        assert events.index(f"computed {number + 1}") < events.index(f"receive {number}")
    assert events[:3] == ["gather 0", "adamw 0", "gather 1"]
    assert buffers == buffer_addresses()


# ------------------------------------------------------------------ what torch puts around a model or an optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))])
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks[0](self.embedding(tokens)))
        return logits


@pytest.mark.parametrize("how", ["gradient_as_bucket_view", "static_graph"])
@on_ranks(2)
def test_ddp_with_checkpointed_activations_has_the_bits_of_one_process(how: str) -> None:
    """With views into its buckets as gradients, which begin anywhere in memory, and with a graph that stays.

    The momentum is shared by the replicas: then each took its part of such a view from the start of the bucket.
    """
    model, alone = Net(), Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    wrapped = DistributedDataParallel(model, **{how: True})
    settings = {"lr": 0.02, "compute_dtype": torch.float32}
    optimizer = mm.from_model(wrapped, process_group="world", shard_state=True, **settings)
    other = mm.from_model(alone, process_group="local", **settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randint(0, 11, (5,), generator=generator)).square().mean().backward()
        for weight, twin in zip(model.parameters(), alone.parameters(), strict=True):
            assert weight.grad is not None
            twin.grad = weight.grad.clone()
        optimizer.clip_grad_norm_(0.1)
        other.clip_grad_norm_(0.1)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


class World(mm.Muon):
    """ZeroRedundancyOptimizer has a ``process_group=`` of its own, so only a class can pass one on."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, process_group="world", **settings)


class Auto(mm.Muon):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, process_group="auto", **settings)


@pytest.mark.parametrize(
    ("kind", "split", "expected"),
    [
        (mm.Muon, False, "(?s)nothing says which ranks hold the same parameter.*ZeroRedundancyOptimizer"),
        (mm.Muon, True, "(?s)found 4 param_names for 2 parameters.*ZeroRedundancyOptimizer"),
        (World, False, "their gradients differ"),
        (Auto, False, "their gradients differ"),
    ],
)
@on_ranks(2)
def test_zero_redundancy_optimizer_is_refused(kind: Any, split: bool, expected: str) -> None:
    """Each rank's optimizer has other parameters, so the ranks would step each other's matrices."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)]))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
    groups = mm.split_params(model) if split else list(model.parameters())
    with pytest.raises(ValueError, match=expected):
        ZeroRedundancyOptimizer(groups, kind, lr=0.1).step()
    assert all(map(torch.equal, before, model.parameters()))


# ------------------------------------------------------------------ an optimizer that is not needed any more


LAYOUTS = ["local", "ddp", "fsdp", "hsdp", "rows-cols"]


@pytest.mark.parametrize("settings", [{}, {"shard_state": True}, {"memory_budget_mb": 0.016}], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "wrapped"])
@on_ranks(4)
def test_an_optimizer_is_freed_without_a_collection(layout: str, settings: dict[str, Any]) -> None:
    """Step, clip, measure and save; then drop the optimizer and say what of it is still alive without a collection."""
    if layout == "wrapped":
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)))
        optimizer = mm.from_model(model, **settings)
    else:
        model, group = hold(layout, initial())
        optimizer = mm.Muon(groups(model), process_group=group, **{**SETTINGS, **settings})
    gc.collect()
    gc.disable()
    try:
        for step in range(2):
            if layout == "wrapped":
                model(torch.ones(2, 8)).sum().backward()
            else:
                for name, parameter in model.named_parameters():
                    parameter.grad = placed_like(parameter, gradients(step)[name])
            optimizer.clip_grad_norm_(1.0, skip_above="4x")
            optimizer.step()
            optimizer.metrics()
            optimizer.zero_grad()
        optimizer.explain()
        optimizer.state_dict()
        runtime = optimizer._runtime
        planned = runtime.planned
        assert planned is not None
        watched = {
            "optimizer": weakref.ref(optimizer),
            "kept": weakref.ref(runtime),
            "plan": weakref.ref(planned),
            "exchange": weakref.ref(planned.exchange),
            **{f"state {n}": weakref.ref(v) for n, s in enumerate(optimizer.state.values()) for v in s.values()},
            **{name: weakref.ref(parameter) for name, parameter in model.named_parameters()},
        }
        del optimizer, runtime, planned
        names = [name for name in list(watched)[:4] if watched[name]() is not None]
        names += [name for name in watched if name.startswith("state") and watched[name]() is not None]
        assert names == []
    finally:
        gc.enable()
