"""For tests of your own rules: checks that a rule gives the same bits in every layout of its parameters."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.placing import placements_of
from muonmesh.comm.storage import Storage, local_of, world_size
from muonmesh.errors import explain_error
from muonmesh.layout import FlatShards, Layout, MeshLayout
from muonmesh.numerics.rules import RULES, ElementwiseRule, Rule, is_known
from muonmesh.numerics.rules.rule import check_result
from muonmesh.optimizer import Muon
from muonmesh.step.connection import placed_members
from muonmesh.step.runtime import Driver
from muonmesh.tools.local_part import local_part

_SPECS: tuple[tuple[tuple[int, ...], Any], ...] = (
    ((1, 1), "whole"),
    ((1, 9), "whole"),
    ((7, 1), "whole"),
    ((3, 20), "whole"),
    ((26, 12), "whole"),
    ((13, 30), "whole"),
    ((16, 16), "whole"),
    ((20, 12), ("rows", 12, 4, 4)),
    ((10, 26), ("cols", 7, 19)),
    ((24, 14), ("heads", 4, 0)),
    ((12, 24), ("heads", 3, 1)),
    ((22, 12), ("interleaved", 2, 0)),
    ((12, 18), ("interleaved", 3, 1, 2)),
    ((10, 30), ("transposed", ("rows", 10, 10, 10))),
    ((5, 6, 14), "stack"),
    ((3, 8, 10), ("stack", ("rows", 4, 4))),
    ((9, 4, 3, 3), "flatten"),
    ((8, 3, 2, 2), ("flatten", ("rows", 6, 2))),
)
"""Shapes and splits: smaller than the number of ranks, not divisible by it, tall, wide and square."""

_STEPS = 3

_LENGTHS = 1, 2, 7, 16, 33, 64, 131, 1024, 40_000
"""Numbers of elements that elementwise parts get together; with the last, torch on a CPU shares them among threads."""

_FAR = 1e-5
"""Largest difference between a device and a CPU in fp32, relative to the largest number of a tensor."""


def prove_rule(
    rule: type[Rule | ElementwiseRule] | str,
    *,
    examples: int = 40,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Check that a rule gives bit for bit the same weights and state in every layout of its parameters.

    Every rank of the default process group must call this function, on the CPU (gloo). It first checks that the
    elementwise parts compute the same for a whole vector and for its two pieces, and that a rule with
    ``scale_invariant`` makes the same steps of larger gradients. Then it generates ``examples`` cases.
    In each case, one process holds a whole parameter, and all ranks hold the same parameter in a generated layout
    (replicated, sharded on a mesh of one or two axes, or flat; with or without ``shard_state``). Both take a few steps,
    some without a gradient or with one that is zero in part: first as on a CPU, then as on a device, where flags mask
    all writes. In fp32 the two may differ by 1e-5 of the largest number of each tensor; in bf16 they are not compared
    with each other. One process without torch.distributed checks the elementwise parts and compares the two.

    Args:
        rule: The rule, or the algorithm that it is registered as.
        examples: Number of cases.
        seed: Seed of the generated cases.
        settings: Settings of the rule's param group, such as its own hyperparameters.

    Returns:
        A sentence to print about the checked ranks, layouts and shapes.

    Raises:
        AssertionError: on every rank, naming the part of the rule or the case, and what differs or is not finite.
        ValueError: the rule is not registered.
    """
    if isinstance(rule, str):
        is_known(rule)  # imports the rule if an installed package declares it
    names = [name for name, registered in RULES.items() if rule in (name, registered)]
    if not names:
        write = 'Write @muonmesh.register_rule("a name") in front of it'
        raise ValueError(explain_error("prove_rule", repr(rule), "a rule that groups can name", write))
    group = {"algorithm": names[0], **(settings or {})}
    generator = random.Random(seed)
    _agree(_parts_that_see_neighbours(group, generator) or _scale_that_counts(group))
    mesh_of = functools.cache(functools.partial(init_device_mesh, "cpu"))
    cases = [_case(generator) for _ in range(examples)]
    for case in cases:
        differing, digest = _differences(case, group, mesh_of)
        _agree(differing)
        _agree(_apart(digest, case))
    return _summary(names[0], cases)


def _summary(rule: str, cases: Sequence[SimpleNamespace]) -> str:
    """Return the sentence about the checked cases."""
    ranks, counts = world_size(), Counter(case.how for case in cases)
    kinds = {"mesh": "on a mesh", "plain": "replicated", "flat": "in a flat buffer"}
    layouts = ", ".join(f"{counts[how]} {words}" for how, words in kinds.items() if counts[how])
    shapes = f"{len({case.shape for case in cases})} shapes"
    if ranks > 1:
        return f"{rule}: {ranks} ranks have the bits of one process in all {len(cases)} cases ({layouts}; {shapes})"
    fp32 = sum(case.options["compute_dtype"] == torch.float32 for case in cases)
    return (
        f"{rule}: in one process, the operations of a CPU and of a device agree up to rounding in all {fp32} cases in "
        f"fp32, and their results are finite in all {len(cases)} cases ({shapes}). Sharding was not tried: start this "
        "on several ranks, as with torchrun --nproc-per-node 4"
    )


def _case(generator: random.Random) -> SimpleNamespace:
    """Return a generated parameter with its layout; ``repr()`` describes it."""
    world = world_size()
    shape, spec = generator.choice(_SPECS)
    several = dist.is_available() and dist.is_initialized()
    how = generator.choice(["mesh", "mesh", "mesh", "plain", "flat"] if several else ["plain", "flat"])
    factors = [size for size in range(1, world + 1) if world % size == 0]
    first = generator.choice(factors)
    sizes = generator.choice([(world,), (first, world // first)])
    dims, count = range(len(shape)), math.prod(shape)

    def placement() -> Placement:
        sharded = Shard(generator.choice(dims)), Shard(generator.choice(dims))
        strided = _StridedShard(generator.choice(dims), split_factor=generator.randint(1, 3))
        return generator.choice([Replicate(), *sharded, strided])

    return SimpleNamespace(
        shape=shape,
        spec=spec,
        how=how,
        sizes=sizes,  # of the mesh that it may be on
        placements=tuple(placement() for _ in sizes),
        borders=(0, *sorted(generator.randint(0, count) for _ in range(world - 1)), count),  # where a flat one is cut
        options={  # of the optimizer, the same in one process
            "compute_dtype": generator.choice([torch.float32, torch.bfloat16]),
            "memory_budget_mb": generator.choice([None, 0.016]),
        },
        gradients=[generator.choice(["given", "given", "given", "none", "zero", "in part"]) for _ in range(_STEPS)],
        shard_state=generator.random() < 0.5,
        seed=generator.randrange(10**6),
    )


def _differences(
    case: SimpleNamespace, group: Mapping[str, Any], mesh_of: Callable[[tuple[int, ...]], DeviceMesh]
) -> tuple[str, str]:
    """Step a case in its layout and in one process, as on a CPU and as on a device.

    Returns:
        What differs, as text; and a digest of the results in one process.
    """
    ranks = tuple(range(world_size()))
    if case.how == "mesh":
        layout: Layout = MeshLayout(case.shape, case.sizes, ranks, placements_of("parameter", case.placements))
        storage = Storage(layout, case.shape, mesh_of(case.sizes), case.placements)
    else:
        flat = case.how == "flat"
        layout = FlatShards.cut(case.shape, ranks, case.borders) if flat else MeshLayout.replicated(case.shape, ranks)
        storage = Storage(layout, case.shape)
    # All ranks run both before any rank raises an error; otherwise the other ranks would wait for it.
    (cpu, differing), (device, differing_there) = (
        _stepped(case, group, layout, storage, as_device=as_device) for as_device in (False, True)
    )
    infinite = [key for key in cpu if not bool((cpu[key].isfinite() & device[key].isfinite()).all())]
    far = []
    if case.options["compute_dtype"] == torch.float32:  # in bf16 a device rounds the product of update and step
        far = [key for key, value in cpu.items() if (device[key] - value).abs().max() > _FAR * value.abs().max()]
    for wrong, consequence in (
        (infinite, "are not finite in one process, as after a division by the norm of a row of zeros,"),
        (differing, "differ from one process"),
        (differing_there, "differ from one process by the operations of a device"),
        (far, "differ between the operations of a device and those of a CPU"),
    ):
        if wrong:
            return f"{', '.join(wrong)} {consequence} in {case}", ""
    return "", _digest([*cpu.values(), *device.values()])


def _digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _apart(digest: str, case: SimpleNamespace) -> str:
    """Return, as text, between which ranks one process has other results, since the layouts have those of their rank.

    Args:
        digest: The digest of the results in one process on this rank.
        case: The case.
    """
    everyone = gather_objects(digest)
    other = next((rank for rank, found in enumerate(everyone) if found != everyone[0]), 0)
    if not other:
        return ""
    return (
        f"one process has other results on rank {other} than on rank 0 in {case}; needed parts that do not depend on "
        "the rank or on the process, as on hash() of a text"
    )


def _stepped(
    case: SimpleNamespace, group: Mapping[str, Any], layout: Layout, storage: Storage, *, as_device: bool
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Step a case in its layout and in one process; return weights and state of the latter, and where bits differ."""
    random_numbers = torch.Generator().manual_seed(case.seed)
    start = _randn(case.shape, random_numbers)
    alone, shared = nn.Parameter(start.clone()), nn.Parameter(storage.wrap(local_part(start, layout)))
    sharded: dict[str, Any] = {"process_group": "world"} if case.how == "plain" else {}
    if case.how == "flat":
        sharded["layouts"] = {"parameter": layout}
    optimizers = []
    for parameter, arguments in (
        (alone, {"process_group": "local"}),
        (shared, sharded | {"shard_state": case.shard_state}),
    ):
        entry = {**group, "params": [parameter], "param_names": ["parameter"], "matrices": [case.spec]}
        optimizer = Muon([entry], lr=0.02, **case.options, **arguments)
        optimizer._runtime.driver = Driver(not as_device)
        optimizers.append(optimizer)
    for kind in case.gradients:
        gradient = _randn(case.shape, random_numbers)
        if kind == "zero":
            gradient.zero_()
        elif kind == "in part":  # a row and a column of every matrix, if it is not split
            gradient[..., :1, :] = gradient[..., :1] = 0
        alone.grad = gradient if kind != "none" else None
        shared.grad = storage.wrap(local_part(gradient, layout)) if kind != "none" else None
        for optimizer in optimizers:
            optimizer.step()
    expected = {"weights": alone.detach(), **optimizers[0].state[alone]}
    after = {"weights": shared.detach(), **optimizers[1].state[shared]}
    state_layouts = placed_members(optimizers[1])[0].state_layouts
    # With a device, the CPU does not know whether any rank has had a gradient, so a shard has its state from step 1 on.
    wrong = sorted(expected.keys() - after.keys() if as_device else expected.keys() ^ after.keys())
    for key in expected.keys() & after.keys():
        placed = layout if key == "weights" else state_layouts[key].storage.layout if key in state_layouts else None
        value = local_part(expected[key].view(placed.shape), placed) if placed is not None else expected[key]
        if not torch.equal(local_of(after[key]).reshape(value.shape), value):
            wrong.append(key)
    return expected, wrong


def _parts_that_see_neighbours(group: Mapping[str, Any], generator: random.Random) -> str:
    """Return the first elementwise part of a rule whose bits for an element depend on its neighbors, as text."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    settings = Muon([{**group, "params": [weight]}]).param_groups[0]
    rule: Rule | ElementwiseRule = RULES[group["algorithm"]].of(settings)
    keeps = rule.keeps()
    numbers = torch.Generator().manual_seed(generator.randrange(10**6))
    for length, dtype in itertools.product(_LENGTHS, (torch.float32, torch.bfloat16)):
        border = generator.randint(0, length)
        inputs = {name: _randn((length,), numbers) for name in ("gradient", "weights", "update")}
        inputs["gradient"] = inputs["gradient"].to(dtype)
        inputs |= {key: _randn((length,), numbers).abs() for key in keeps}
        if isinstance(rule, Rule) and rule.count_of_sums() and (key := _written_by_summands(rule, inputs)):
            return (
                f"{type(rule).__name__}.summands: {key!r} has been written; needed all but the update read only, since "
                "it is called more than once in a step. What is kept belongs into apply()"
            )
        cuts = slice(0, None), slice(0, border), slice(border, None)
        copies = [{key: value[cut].clone() for key, value in inputs.items()} for cut in cuts]
        shape = (2, length // 2) if length % 2 == 0 else (length, 1)
        copies.append({key: value.view(shape).clone() for key, value in inputs.items()})
        try:
            whole, *halves, rows = [_run_parts(rule, part_inputs) for part_inputs in copies]
        except Exception as error:
            return (
                f"{type(rule).__name__}: {error!r} on {length} elements or on {border} of them; needed parts that work "
                "element by element on any number of elements, also on none"
            )
        if not torch.equal(copies[0]["gradient"], inputs["gradient"]):
            return f"{type(rule).__name__}: the gradient has been written; needed it read only, since it is the user's"
        for part, values in whole.items():
            for joined, low, high, of_rows in zip(values, halves[0][part], halves[1][part], rows[part], strict=True):
                other = f"{border} and {length - border} apart"
                if torch.equal(joined, torch.cat([low, high])):
                    other = f"as a matrix of {shape[0]}×{shape[1]}"
                    if torch.equal(joined, of_rows.reshape(-1)):
                        continue
                return (
                    f"{type(rule).__name__}.{part}: {length} elements together have other bits than {other}; needed "
                    "operations that work element by element, in any shape, and draw no random numbers. What needs "
                    "whole matrices belongs into whole()"
                )
    return ""


def _scale_that_counts(group: Mapping[str, Any]) -> str:
    """Return, as text, by how much larger gradients change the steps of a rule that is declared `scale_invariant`."""
    rule = RULES[group["algorithm"]]
    moved = []
    for factor in (1.0, 1024.0) if rule.scale_invariant else ():
        random_numbers = torch.Generator().manual_seed(0)
        start = _randn((16, 24), random_numbers)
        parameter = nn.Parameter(start.clone())
        optimizer = Muon([{**group, "params": [parameter]}], lr=0.02, process_group="local")
        for _ in range(_STEPS):
            parameter.grad = factor * _randn(start.shape, random_numbers)
            optimizer.step()
        moved.append(parameter.detach() - start)
    if moved and (changed := float((moved[1] - moved[0]).norm() / moved[0].norm())) > 0.01:
        return (
            f"{rule.__name__}.scale_invariant: True, but gradients times 1024 change {_STEPS} steps by {changed:.1%}; "
            "needed False if the size of the gradients matters, so that they are clipped"
        )
    return ""


def _written_by_summands(rule: Rule, inputs: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor that a rule's summands write although they must not; empty if there is none."""
    copies = {key: value.clone() for key, value in inputs.items()}
    state = {key: copies[key] for key, kept_as in rule.keeps().items() if kept_as == "weights"}
    rule.summands(copies["weights"], copies["update"], 0.01, state)
    return next((key for key in ("weights", *state) if not torch.equal(copies[key], inputs[key])), "")


def _run_parts(rule: Rule | ElementwiseRule, inputs: Mapping[str, Tensor]) -> dict[str, Sequence[Tensor]]:
    """Return the results of each elementwise part of a rule for vectors."""
    if isinstance(rule, ElementwiseRule):
        weights, counts = inputs["weights"], [torch.zeros((), dtype=torch.float32, device="cpu")]
        state = {key: [inputs[key]] for key in rule.keeps()}
        rule.step([weights], [inputs["gradient"].to(weights.dtype)], state, counts, stop=None, measured=False)
        return {"step": (weights, *(inputs[key] for key in rule.keeps()))}
    folded = {key: inputs[key] for key, kept_as in rule.keeps().items() if kept_as == "momentum"}
    applied = {key: inputs[key] for key, kept_as in rule.keeps().items() if kept_as == "weights"}
    weights, update = inputs["weights"], inputs["update"]
    rule.fold(inputs["gradient"], folded)
    direction = rule.direction(inputs["gradient"], folded)
    check_result(rule.direction, direction, weights.shape)
    direction = direction.clone()
    results: dict[str, Sequence[Tensor]] = {"fold": tuple(folded.values()), "direction": (direction,)}
    matrix_sums, sums = dict[str, Tensor](), tuple[Tensor, ...]()
    if sums_needed := rule.count_of_sums():
        results["summands"] = rule.summands(weights, update.clone(), 0.01, applied)
        sums = tuple(torch.full((), 1.5 + number, dtype=torch.float64, device="cpu") for number in range(sums_needed))
        of_matrices = [key for key, kept_as in rule.keeps().items() if kept_as == "matrix"]
        matrix_sums = {key: torch.full((), 0.75, dtype=torch.float64, device="cpu") for key in of_matrices}
    rule.apply(weights, update, 0.01, {**applied, **matrix_sums}, sums)
    results["apply"] = (weights, *applied.values())
    return results


def _randn(shape: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")


def _agree(error: str) -> None:
    """Raise on every rank if there is an error on any."""
    everyone = gather_objects(error)
    for rank, text in enumerate(everyone):
        if text:
            raise AssertionError(f"rank {rank}: {text}" if len(everyone) > 1 else text)
