"""Checkpoints by Megatron's dist_checkpointing: what is resumed continues bit for bit, whatever it went through."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import get_megatron_optimizer as megatrons
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

import muonmesh as mm
from muonmesh.errors import StateError
from muonmesh.integrations.megatron import get_megatron_optimizer
from muonmesh.step.connection import placed_members
from tests.megatron import cpu, gathered, host
from tests.megatron.host import Shape
from tests.megatron.oracle import Oracle
from tests.megatron.shapes import MOE, MTP, ONE_LAYER, SEQUENCE
from tests.support.in_copies import work_in_copies
from tests.support.problem import Bag

COVERS = (
    "integrations.megatron.checkpoint.sharded",
    "integrations.megatron.checkpoint.restore",
    "integrations.megatron.layouts.saved_boxes_of",
)

BF16, FP16 = torch.bfloat16, torch.float16


class Run:
    """A model with its optimizer. `seed` differs between runs, so that nothing is right before it is loaded."""

    def __init__(self, shape: Shape, seed: int, muon: dict[str, Any], **settings: Any) -> None:
        host.begin(shape)
        self.shape, self.chunks = shape, host.chunks_of(shape, seed=seed)
        self.optimizer = get_megatron_optimizer(
            host.optimizer_config(shape), self.chunks, muon=muon, policy="all", skip_above="1e9x", **settings
        )
        if "state_device" in muon:
            work_in_copies(self.optimizer.optimizer)  # told to, a CPU works in copies too

    def state(self, is_loading: bool) -> dict[str, Any]:
        (chunk,) = self.chunks
        # With the group that Megatron's own save adds, which layers of multi-token prediction ask for.
        model = chunk.module.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def save(self, path: Path, *how: Any, **settings: Any) -> Any:
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        return dist_checkpointing.save(self.state(is_loading=False), str(path), *how, **settings)

    def load(self, path: Path) -> None:
        loaded = dist_checkpointing.load(self.state(is_loading=True), str(path))
        self.chunks[0].module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def state_tensors(self) -> dict[tuple[str, str], Tensor]:
        """All state of this rank, means of norms and step counts too, which only later steps would show."""
        optimizer = self.optimizer.optimizer
        optimizer.finish()
        means = {(group["name"], "means"): torch.tensor(group["norm_means"]) for group in optimizer.param_groups}
        return means | {
            (member.name, key): getattr(value, "_local_tensor", value).clone()
            for member in placed_members(optimizer)
            for key, value in optimizer.state[member.tensor].items()
        }

    def train(self, turns: range) -> tuple[list[list[float]], dict[str, Tensor]]:
        losses = []
        for step in turns:
            self.optimizer.zero_grad()
            losses.append(host.backward(self.shape, self.chunks, self.optimizer, step))
            self.optimizer.step()
        return losses, gathered.gather(gathered.local_values(gathered.named(self.chunks)))


@host.writers()
def resumed_through(shape: Shape, others: list[Shape], folder: Path, muon: dict[str, Any]) -> list[bool]:
    """Whether a run that went through a checkpoint of each of the others in turn goes on as if nothing had been."""
    first = Run(shape, 7, muon)
    first.train(range(2))
    path = folder / "saved"
    first.save(path)
    saved = first.state_tensors()
    losses, parameters = first.train(range(2, 4))
    same = []
    for number, other in enumerate([shape, *others]):
        through = Run(other, 8 + number, muon)
        through.load(path)
        path = folder / str(number)
        through.save(path)
        back = Run(shape, 20 + number, muon)
        back.load(path)
        loaded = back.state_tensors()
        alike = loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)
        again, after = back.train(range(2, 4))
        same.append(
            alike and again == losses and all(torch.equal(after[name], parameters[name]) for name in parameters)
        )
    return same


@host.writers()
def of_adam(shape: Shape, path: Path) -> list[str]:
    """What is said to who loads a checkpoint of Megatron's own Adam: in its two formats, and without keys."""
    run = Run(shape, 7, {})
    adam = megatrons(host.optimizer_config(shape), run.chunks)
    host.backward(shape, run.chunks, adam, 0)
    adam.step()
    muonmesh_optimizer, run.optimizer = run.optimizer, adam
    run.save(path)
    run.optimizer = muonmesh_optimizer
    before, messages = run.state_tensors(), list[str]()
    for load in (
        lambda: run.load(path),
        lambda: muonmesh_optimizer.load_state_dict(adam.state_dict()),
        lambda: muonmesh_optimizer.load_state_dict({**muonmesh_optimizer.sharded_state_dict(), "state": {}}),
    ):
        with pytest.raises((CheckpointException, StateError), match="write --no-load-optim") as caught:
            load()
        messages.append(str(caught.value))
    after = run.state_tensors()
    assert all(torch.equal(before[key], after[key]) for key in before)
    return messages


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_checkpoint_of_megatrons_adam_names_the_argument(workers, tmp_path: Path, dtype: torch.dtype) -> None:
    for messages in workers(2).run(of_adam, Shape(dtype=dtype, model=ONE_LAYER), tmp_path / "saved", timeout=120.0):
        assert re.search(
            r"KeyError: .*optimizer.state.momentum_buffer.[\w.]+\W+ \(To begin with new state, ", messages[0]
        )
        assert "found the state of another optimizer; needed that of this one" in messages[1]
        assert "found no state of it" in messages[2]


def whole_model(plain: Oracle) -> nn.Module:
    """Modules that hold the parameters under their names."""
    model = Bag({})
    for name, parameter in plain.parameters.items():
        model.put(name, parameter)
    return model


def through_plain(shape: Shape, folder: Path) -> tuple[dict[str, float], bool, bool]:
    """Two steps with Megatron, and on from there by whole parameters without it, and from there with it again.

    Returns:
        By how much the plain parameters differ after one more step; whether Megatron's next steps from what the plain
        ones saved have the same losses and parameters as without any of this.
    """
    run = Run(shape, 7, {})
    run.train(range(2))
    mm.checkpoint.save(folder / "megatron", run.chunks[0], run.optimizer)
    wholes = gathered.gather(gathered.local_values(gathered.named(run.chunks)))
    zeros = {name: torch.zeros_like(value).float() for name, value in wholes.items()}
    plain = Oracle(zeros, process_group="world")
    mm.checkpoint.load(folder / "megatron", whole_model(plain), plain.optimizer)
    run.optimizer.zero_grad()
    host.backward(shape, run.chunks, run.optimizer, 2)
    reduced = gathered.gather(gathered.local_values(gathered.named(run.chunks), gathered.gradients(run.chunks)))
    run.optimizer.step()
    plain.step(reduced, policy="all", skip_above="1e9x")
    rounded = {name: value.detach().to(shape.dtype) for name, value in plain.parameters.items()}
    wholes = gathered.gather(gathered.local_values(gathered.named(run.chunks)))
    differing = {name: float((rounded[name] - wholes[name]).float().abs().max()) for name in wholes}
    mm.checkpoint.save(folder / "plain", whole_model(plain), plain.optimizer)
    back = Run(shape, 9, {})
    mm.checkpoint.load(folder / "plain", back.chunks[0], back.optimizer)
    (losses, after), (again, expected) = back.train(range(3, 5)), run.train(range(3, 5))
    same = all(torch.equal(after[name], expected[name]) for name in expected)
    return {name: value for name, value in differing.items() if value}, losses == again, same


@pytest.mark.parametrize(
    "shape",
    [Shape(tp=2), Shape(flat=True), Shape(tp=2, flat=True, dtype=BF16)],
    ids=["TP 2", "distributed optimizer", "bf16, TP 2, distributed optimizer"],
)
def test_to_the_plain_optimizer_and_back(workers, tmp_path: Path, shape: Shape) -> None:
    """`muonmesh.checkpoint` reads and writes Megatron's runs where names are those of the whole model."""
    assert workers(2).run(through_plain, shape, tmp_path, timeout=120.0) == [({}, True, True)] * 2


def save_of_stages_refused(folder: Path) -> None:
    run = Run(Shape(pp=2), 7, {})
    with pytest.raises(StateError, match=r"2 pipeline stages.*one stage.*Save with megatron.core.dist_checkpointing"):
        mm.checkpoint.save(folder / "saved", run.chunks[0], run.optimizer)


def test_other_names_than_those_of_the_whole_model_are_refused(workers, tmp_path: Path) -> None:
    workers(2).run(save_of_stages_refused, tmp_path)


CASES: dict[str, tuple[Shape, list[Shape], dict[str, Any]]] = {
    "fp32": (Shape(tp=2), [Shape(tp=4), Shape(flat=True)], {}),
    "bf16, distributed optimizer": (
        Shape(tp=2, flat=True, dtype=BF16),
        [Shape(tp=4, dtype=BF16), Shape(flat=True, dtype=BF16)],
        {"rule": "normuon", "state_dtype": BF16},
    ),
    "fp16, tied over stages": (
        Shape(pp=2, tied=True, dtype=FP16),
        [Shape(tied=True, flat=True, dtype=FP16)],
        {"shard_state": True},
    ),
    "another padded vocabulary": (
        Shape(tp=2, flat=True, dtype=BF16),
        [Shape(tp=4, dtype=BF16, vocabulary=80), Shape(flat=True, dtype=BF16, vocabulary=72)],
        {},
    ),
    "another padded vocabulary, tied over stages": (
        Shape(pp=2, tied=True),
        [Shape(tp=4, tied=True, vocabulary=80), Shape(pp=2, tied=True, flat=True, vocabulary=66)],
        {},
    ),
    # The embedding is on the last stage too, under the same name.
    "multi-token prediction over stages": (Shape(pp=2, model=MTP), [Shape(tp=2, flat=True, model=MTP)], {}),
    # No other run knows of the stage that has none.
    "nothing to train on a stage": (Shape(pp=2, frozen_stage=0), [Shape(pp=2, flat=True, frozen_stage=0)], {}),
    # Without expert parallelism experts are in the groups of the dense weights.
    "experts": (
        Shape(ep=2, model=MOE + ONE_LAYER),
        [Shape(ep=2, flat=True, model=MOE + ONE_LAYER), Shape(model=MOE + ONE_LAYER)],
        {"rule": "hyperball"},
    ),
    "experts that tensor parallelism cuts otherwise than the rest": (
        Shape(ep=2, etp=2, model=MOE + ONE_LAYER),
        [Shape(tp=2, ep=2, etp=2, flat=True, model=MOE + SEQUENCE + ONE_LAYER), Shape(ep=2, model=MOE + ONE_LAYER)],
        {"state_device": "cpu"},
    ),
    "what owners keep, by turns": (
        Shape(tp=2, model=ONE_LAYER),
        [Shape(tp=4, model=ONE_LAYER), Shape(flat=True, model=ONE_LAYER)],
        {"rule": "soap", "soap_every": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_is_continued(workers, tmp_path: Path, name: str) -> None:
    """State of every rule, masters, counts and running norms; each way goes through another way of cutting up."""
    shape, others, muon = CASES[name]
    assert (
        workers(4).run(resumed_through, shape, others, tmp_path, muon, timeout=120.0)
        == [[True] * (1 + len(others))] * 4
    )


MEGATRONS: dict[str, Any] = {"async_strategy": "mcore"} if host.LATER else {}
"""Whose writers: later versions take those of a package for CUDA by default."""


@host.writers()
def saved_while_it_trains(shape: Shape, folder: Path, persistent: bool) -> tuple[list[int], bool, bool]:
    """Save as Megatron-LM's scripts do with ``--async-save --ckpt-assume-constant-structure``, three times.

    Returns:
        Which checkpoints were written before two more steps were taken; whether the last has the state from before
        these; and whether a run that loads it goes on as they did.
    """
    queue, run = AsyncCallsQueue(persistent=persistent), Run(shape, 7, {})
    strategy = get_default_save_sharded_strategy()
    strategy.use_cached_ckpt_structure = True
    strategy = FullyParallelSaveStrategyWrapper(strategy, parallel_state.get_data_parallel_group(), True)
    try:
        for step in range(3):
            run.train(range(step, step + 1))
            saved, gate = run.state_tensors(), folder / f"gate {step}"
            request = run.save(folder / str(step), strategy, async_sharded_save=True, **MEGATRONS)
            queue.schedule_async_request(
                request._replace(async_fn=request.async_fn and functools.partial(cpu.once, gate, request.async_fn))
            )
            losses, parameters = run.train(range(3, 5)) if step == 2 else ([], {})
            early = queue.maybe_finalize_async_calls(blocking=False)
            gate.touch()
            queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close()
    back = Run(shape, 8, {})
    back.load(folder / "2")
    loaded = back.state_tensors()
    again, after = back.train(range(3, 5))
    same = again == losses and all(torch.equal(after[name], parameters[name]) for name in parameters)
    return early, loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved), same


@pytest.mark.parametrize(
    ("shape", "persistent"),
    [(Shape(tp=2), False), (Shape(flat=True, dtype=BF16), True)],
    ids=["a process for each checkpoint", "one process, distributed optimizer"],
)
def test_saved_while_it_trains(workers, tmp_path: Path, shape: Shape, persistent: bool) -> None:
    """``--async-save``; with one process for all checkpoints what lies on a CPU is in memory that it shares."""
    by_rank = workers(2).run(saved_while_it_trains, shape, tmp_path, persistent, timeout=180.0)
    assert by_rank == [([], True, True)] * 2


@host.writers()
def before_the_first_step(folder: Path) -> bool:
    first, second = Run(Shape(tp=2), 7, {}), Run(Shape(tp=2, flat=True), 8, {})
    first.save(folder / "saved")
    second.load(folder / "saved")
    _, parameters = first.train(range(2))
    _, after = second.train(range(2))
    return all(torch.allclose(after[name], parameters[name], atol=1e-6) for name in parameters)


def test_saved_before_the_first_step(workers, tmp_path: Path) -> None:
    """The two ways of reducing gradients may round otherwise."""
    assert workers(2).run(before_the_first_step, tmp_path) == [True] * 2


@host.writers()
def under_other_overrides(shape: Shape, folder: Path) -> tuple[dict[str, list[dict[str, float]]], list[bool], str]:
    """Save with an override of a rate, and load with others.

    Returns:
        For each way to load: the rates of the groups with parameters of this rank; whether the state is what was saved;
        and what is said to another rule.
    """
    saved = Run(shape, 7, {}, overrides={"linear_fc1": {"lr": 0.01}})
    saved.train(range(1))
    saved.save(folder / "saved")
    before = {key: value for key, value in saved.state_tensors().items() if key[1] != "means"}
    rates, same = dict[str, list[dict[str, float]]](), list[bool]()
    ways: dict[str, Any] = {"same": {"linear_fc1": {"lr": 0.01}}, "other": {"linear_fc1": {"lr": 0.03}}}
    ways |= {"none": {}, "more": {"linear_fc[12]": {"lr": 0.03}}, "new": {"layers.0": {"weight_decay": 0.0}}}
    for seed, (way, overrides) in enumerate(ways.items()):
        run = Run(shape, 8 + seed, {}, overrides=overrides)
        run.load(folder / "saved")
        rates[way] = [
            {name.rpartition("mlp.")[2]: group["lr"] for name in group["param_names"] if ".mlp." in name}
            for group in run.optimizer.param_groups
        ]
        after = run.state_tensors()
        same.append(all(torch.equal(after[key], before[key]) for key in before))
    other = Run(shape, 20, {}, overrides={"linear_fc2": "adamuon"})
    other.save(folder / "other")
    with pytest.raises(StateError, match="state of rule 'adamuon'; needed that of rule 'muon'") as caught:
        saved.load(folder / "other")
    return rates, same, str(caught.value)


@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(pp=2, flat=True)], ids=["TP 2", "PP 2"])
def test_settings_are_found_by_parameters(workers, tmp_path: Path, shape: Shape) -> None:
    """Megatron once missed the key of a group: its name has the settings of the overrides."""
    for rates, same, _ in workers(2).run(under_other_overrides, shape, tmp_path, timeout=120.0):
        fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
        by_way = {
            way: {name: rate for group in groups for name, rate in group.items()} for way, groups in rates.items()
        }
        assert by_way["same"] == by_way["other"] == {fc1: 0.01, fc2: 0.02}
        # A group whose parameters had several rates keeps its own.
        assert by_way["none"] == {fc1: 0.02, fc2: 0.02}
        assert by_way["more"] == {fc1: 0.03, fc2: 0.03}
        assert by_way["new"] == {fc1: 0.02, fc2: 0.02}
        assert same == [True] * 5


@host.writers()
def saved_before_it_is_gathered(shape: Shape, folder: Path) -> dict[str, float]:
    """By how much loaded weights differ from those of the run, which each rank knows in part when it saves."""
    run = Run(shape, 7, {})
    run.optimizer.zero_grad()
    host.backward(shape, run.chunks, run.optimizer, 0)
    run.optimizer.step()
    run.save(folder / "saved")
    back = Run(shape, 8, {})
    back.load(folder / "saved")
    loaded = {name: parameter.detach().clone() for name, parameter in gathered.named(back.chunks).items()}
    run.chunks[0].start_param_sync(force_sync=True)
    expected = gathered.named(run.chunks)
    return {n: float((loaded[n] - expected[n]).abs().max()) for n in loaded if not torch.equal(loaded[n], expected[n])}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_weights_are_gathered_before_they_are_saved(workers, tmp_path: Path, dtype: torch.dtype) -> None:
    """``overlap_param_gather``: Megatron-LM's scripts gather before they save; a script of one's own does not."""
    shape = Shape(flat=True, overlap=True, late_gather=True, dtype=dtype)
    assert workers(2).run(saved_before_it_is_gathered, shape, tmp_path) == [{}, {}]
