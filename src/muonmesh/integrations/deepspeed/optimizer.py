"""EngineOptimizer: the optimizer inside a DeepSpeed engine; it steps the tensors that the engine puts into groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from muonmesh.checkpoint.load_plan import IDENTITY
from muonmesh.checkpoint.record import CheckpointedOptimizer, ParameterRecord
from muonmesh.clip.limits import GradNorms, Limits, scale_groups
from muonmesh.clip.norm_means import bring_to_host, keep_means
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import LayoutError, StateError, explain_error
from muonmesh.groups.watch import Watch
from muonmesh.integrations.deepspeed.checkpoint import ELSEWHERE, expert_names, masters_of, publish
from muonmesh.integrations.deepspeed.clipping import measure
from muonmesh.layout import FlatShards, Interval
from muonmesh.layout.matrix import as_tuples
from muonmesh.numerics.rules import rule_of, step_count
from muonmesh.numerics.rules.parts import follow
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.settings.reading import read_groups
from muonmesh.step.connection import placed_members
from muonmesh.step.runtime import UNCLIPPED

_IDENTITY = ("name", "algorithm", "parameters", "matrices")
"""Keys that identify a group; no checkpoint may change them."""

_AS_SAVED = (
    "Make the engine with the same model and optimizer= settings as when it was saved. If another optimizer saved "
)
_AS_SAVED += "it, load only the weights: load_checkpoint(folder, load_optimizer_states=False)"


def _checksum(weights: Tensor) -> Tensor:
    """Return sums of all bits, int64 (61 + at most 60,). Elements that change places by no multiple of 61 change it."""
    bits = weights.reshape(-1).view(torch.int32 if weights.itemsize == 4 else torch.int16)
    whole = len(bits) // 61 * 61
    # The rest is not added up: in a sum of few elements, changes of sign cancel each other too easily.
    return torch.cat([bits[:whole].view(-1, 61).sum(0), bits[whole:].long()])


class EngineOptimizer(torch.optim.Optimizer, CheckpointedOptimizer):
    """Muon and AdamW for a DeepSpeed engine, which lets the optimizer step flat fp32 tensors instead of parameters.

    1. DeepSpeed creates the optimizer inside the engine, and replaces the parameters in its groups by flat tensors. At
       stage 0, DeepSpeed calls `step` once with zero gradients, which does nothing.
    2. `initialize` reads the engine's records, and passes an optimizer for each flat tensor to `bind`.
    3. Each ``engine.step()`` calls `step` once for all groups (stage 0, `BF16_Optimizer`), once for each group (stages
       1 and 2), or once for each sub-group (stage 3). DeepSpeed then hides the other groups. All ranks run the same
       steps in the same order.

    All of them step with the state of this optimizer, under the keys of their rules, such as ``momentum_buffer``. Each
    step uses the current settings of the groups, so schedulers work.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(list(groups), dict(defaults))
        self._identities = [{key: group[key] for key in _IDENTITY} for group in self.param_groups]
        self.awaits: Any = None
        self.watched: tuple[Watch | None, list[dict[str, Any]]] = (None, [])  # with the groups as they were guessed
        self.muons: tuple[Muon, ...] = ()
        self.norms: GradNorms | None = None
        self._reasons: Mapping[str, str] = {}
        self._stepped_by: dict[int, tuple[Muon, dict[str, Any]]] = {}  # by id of the tensor
        self._groups: list[dict[str, Any]] = []  # all of them, while DeepSpeed shows one
        self._numbers: dict[Muon, list[int]] = {}  # of the groups here, for those of each Muon
        self._limits: Limits | None = None
        self._coefficients: dict[int, Tensor] = {}
        self._means: Tensor | None = None  # of the norms, after this step
        self._engine: Any = None
        # Of the engine's flat fp32 tensors, by id: checksums as they were left, and the intervals (begin, end) that are
        # newer than the module's weights.
        self._checksums: dict[int, Tensor] = {}
        self._newer: dict[int, list[tuple[int, int]]] = {}

    def bind(self, muons: Sequence[Muon], reasons: Mapping[str, str], limits: Limits | None, engine: Any) -> None:
        """Take what steps the engine's tensors, and create the state.

        Args:
            muons: An optimizer for each flat tensor of a ZeRO engine; at stage 0 for all parameters that some ranks
                share.
            reasons: Why each parameter is in its group, by name.
            limits: The limits for clipping; None: none.
            engine: The engine.
        """
        self.muons, self._reasons, self._engine = tuple(muons), reasons, engine
        self._groups = self.param_groups
        # Not all of DeepSpeed's optimizers have `overflow`. Accelerate looks for it once, after the engine is made.
        self._zero.overflow = False
        if limits is not None:
            self.clip_by(limits)
        number_of = {name: number for number, group in enumerate(self._groups) for name in group["parameters"]}
        for muon in muons:
            self._stepped_by.update({id(p): (muon, group) for group in muon.param_groups for p in group["params"]})
            self._share(muon)
            numbers = {member.group: number_of[member.name] for member in placed_members(muon)}
            self._numbers[muon] = [number for _, number in sorted(numbers.items())]
        self.create_state()  # DeepSpeed links parameters to their state once
        self._note(*muons)

    def _masters(self, *muons: Muon) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the fp32 weights that some Muons step: their id, them and the module's weights; see `masters_of`."""
        stepped = {id(p) for muon in muons for group in muon.param_groups for p in group["params"]}
        pairs = ((master, weight) for master, weight in masters_of(self._zero) if id(master) in stepped)
        return ((id(master), master.detach(), weight) for master, weight in pairs)

    def _note(self, *muons: Muon) -> None:
        self._checksums.update({key: _checksum(master) for key, master, _ in self._masters(*muons)})

    def _changed(self, key: int, master: Tensor) -> Tensor:
        """Return whether other code has written fp32 weights since they were noted, 0-d bool tensor."""
        return (self._checksums[key] != _checksum(master)).any()

    def fp32_written(self, tensor: Tensor, interval: Interval) -> None:
        """Take note that other code has written an interval of one of the engine's flat fp32 tensors."""
        if interval.length:
            self._newer.setdefault(id(tensor), []).append((interval.start, interval.start + interval.length))

    def weights_loaded(self, *, masters: bool) -> None:
        """Take over the weights that ``load_checkpoint`` of the engine has loaded. All ranks call it.

        Args:
            masters: Whether the fp32 weights are those that count. Otherwise the module's weights count.
        """
        if masters:  # a checkpoint may have fp32 weights that were newer than the module's
            publish(self._zero)
        self._newer.clear()
        self._note(*self.muons)

    def _follow(self, *muons: Muon) -> None:
        """Let the engine's fp32 weights follow the module's where other code has written these since the last step.

        DeepSpeed would undo such a write: it rounds its fp32 weights into the module after each step. But its
        `safe_set_full_fp32_param` writes only the fp32 weights. These then stay, and so does a whole tensor that code
        has written without this function.
        """
        for key, master, weight in self._masters(*muons):
            if key in self._newer:
                begin = 0
                for newer, end in [*sorted(self._newer[key]), (master.numel(), master.numel())]:
                    if begin < newer:
                        follow(master[begin:newer], weight[begin:newer])
                    begin = max(begin, end)
            elif key in self._checksums:
                follow(master, weight, keep=self._changed(key, master))

    def clip_by(self, limits: Limits) -> None:
        """Clip and skip by these limits from the next step on, and turn off the engine's own clipping.

        After a step that changed nothing, ``engine.optimizer.overflow`` is True, DeepSpeed's name for a skipped step.
        The engine then counts a skipped step, and its schedule does not advance.
        """
        self._engine._config.gradient_clipping = 0.0  # read at each step at stage 0
        if hasattr(self._zero, "clip_grad"):
            self._zero.clip_grad = 0.0
        self._limits, self.norms = limits, None

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer in the engine, which wraps this optimizer; at stage 0 it may be this optimizer."""
        return self._engine.optimizer

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the tensors that DeepSpeed has put into the groups. All ranks that share their parameters call it.

        Raises:
            LayoutError: the first training forward contradicts a guess of `split_params`; or a group has a tensor that
                DeepSpeed's records did not name.
        """
        if not self.muons:
            return  # the engine is still being made
        try:
            self._step()
        except BaseException:
            # DeepSpeed shows one group or one tensor at a time, and would go on with what it shows now.
            self.param_groups = self._groups
            if hasattr(self._zero, "_clear_fp32_optimizer_param_groups"):
                self._zero._clear_fp32_optimizer_param_groups()
            raise

    def _step(self) -> None:
        watch, guessed = self.watched
        if watch is not None and watch.facts is not None:
            contradiction = watch.compare(guessed, (), entire=True)
            if contradiction is not None:
                raise contradiction
            self.watched = None, []
        shown = [(group, *self._stepping(tensor)) for group in self.param_groups for tensor in group["params"]]
        visible = list(dict.fromkeys(muon for _, muon, _ in shown))
        error: Exception | None = None
        if self.muons[0] in visible:  # the step begins
            error = self._read_settings()
            if self._limits is not None:
                measured = measure(self._limits, self._zero, self.muons, visible, self.param_groups)
                self.norms, self._coefficients, self._means = measured
        if self.norms is None or not bool(self.norms.skipped):
            if error is not None:
                self.muons[0]._runtime.clip = UNCLIPPED._replace(error=error)
            for muon in visible:
                self._run(muon)
        for group, _, inner in shown:
            group.update({key: value for key, value in inner.items() if key == "steps_taken"})
        if self._means is not None:
            keep_means(self.param_groups, self._means)  # of the groups that DeepSpeed has not hidden
        if self.muons[-1] in visible and self.norms is not None:
            self._zero.overflow = bool(self.norms.skipped)

    def _read_settings(self) -> Exception | None:
        """Let all Muons have the current settings of DeepSpeed's groups, also of those that it hides; the first error.

        The first Muon raises it on all ranks, so that no group is stepped if the settings of another one are wrong.
        """
        error: Exception | None = None
        for muon in self.muons:
            for inner, number in zip(muon.param_groups, self._numbers[muon], strict=True):
                inner.update({key: self._groups[number][key] for key in inner.keys() - {*IDENTITY, "steps_taken"}})
            runtime = muon._runtime
            settings = read_groups(muon.param_groups, runtime.replaced, runtime.last.settings)
            runtime.last.settings, error = settings, error or settings.error  # the step does not read them again
        return error

    def _stepping(self, tensor: Tensor) -> tuple[Muon, dict[str, Any]]:
        """Return the Muon that steps a tensor of DeepSpeed's, and its group there."""
        if id(tensor) not in self._stepped_by:
            problem = f"a tensor of {tensor.numel()} elements to step that its records did not name"
            write = "Make the engine with muonmesh.integrations.deepspeed.initialize, and anew after changing it"
            raise LayoutError(explain_error("DeepSpeed", problem, "the tensors it had when the engine was made", write))
        return self._stepped_by[id(tensor)]

    def _run(self, muon: Muon) -> None:
        self._share(muon)
        if self._limits is not None:
            scale_groups(muon.param_groups, muon.gradients, self._coefficients)
        self._follow(muon)
        muon.step()
        for key, *_ in self._masters(muon):
            self._newer.pop(key, None)
        self._note(muon)

    def _share(self, muon: Muon) -> None:
        """Let a Muon step with the state of this optimizer, which loading replaces."""
        muon.state = self.state

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings. DeepSpeed makes this call for a checkpoint of the same world size.

        Raises:
            StateError: the state belongs to other groups, or to flat tensors in which the parameters lie elsewhere;
                nothing has been loaded.
        """
        self._check_groups(state_dict["param_groups"])
        if state_dict.get("places", self._places) != self._places:
            raise StateError(explain_error("the state", *ELSEWHERE))
        super().load_state_dict(state_dict)
        self._groups = self.param_groups
        for tensor, state in self.state.items():
            if "step" in state:  # torch loads one tensor for all if one was saved, and a number as it is
                state["step"] = step_count(state["step"]).to(tensor.device)  # for torch's fused kernels
        if self._limits is not None:
            self.clip_by(self._limits)  # DeepSpeed has loaded the clipping of the engine that saved
        self._count_on()
        if self.muons:
            self._zero._hp_optimizer_states_linked = False  # DeepSpeed then links the new state at the next step

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings of the groups, and a digest of where the parameters lie.

        Raises:
            StateError: a step was interrupted while it wrote.
        """
        self.refuse_if_interrupted()
        self._settle()
        return {**super().state_dict(), "places": self._places}

    @property
    def _places(self) -> str:
        """A digest of where the parameters lie in the flat tensors of all ranks that share them.

        DeepSpeed loads flat tensors of the same size, whatever lies in them.
        """
        named_layouts = [(member.name, member.storage.layout) for muon in self.muons for member in placed_members(muon)]
        layouts = [(name, layout.intervals) for name, layout in named_layouts if isinstance(layout, FlatShards)]
        return hashlib.sha256(repr(layouts).encode()).hexdigest()

    def _settle(self) -> None:
        """Make the fp32 weights those of the module, and norm means plain numbers, before they are saved."""
        bring_to_host(self.param_groups)
        for key, master, _ in self._masters(*self.muons):
            if key in self._checksums and key not in self._newer and bool(self._changed(key, master)):
                self._newer[key] = [(0, master.numel())]  # until the next step, although it is noted here
        self._follow(*self.muons)
        self._note(*self.muons)

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateError unless saved groups equal these groups in name, algorithm, parameters and splits."""
        pairs: Iterator[tuple[Mapping[str, Any], ...]] = zip_longest(saved, self._identities, fillvalue={})
        for group, identity in pairs:
            for key in _IDENTITY:
                if as_tuples(group.get(key)) != as_tuples(identity.get(key)):
                    problem, needed = f"{key} {group.get(key)!r} in the state", f"{identity.get(key)!r}"
                    raise StateError(explain_error(f"group {identity.get('name')!r}", problem, needed, _AS_SAVED))

    def checkpoint_records(self) -> list[ParameterRecord]:
        """Return a `ParameterRecord` of every parameter with its state; see `CheckpointedOptimizer`."""
        self._settle()
        for muon in self.muons:
            self._share(muon)
        groups = self._group_of
        return [replace(record, group=groups[record.name]) for record in super().checkpoint_records()]

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return the checkpoint names of this rank's experts, by their names in the model."""
        return expert_names(model)

    def checkpoint_restored(self) -> None:
        """Make the engine use the weights and state that `muonmesh.checkpoint.load` has written."""
        self._count_on()
        super().checkpoint_restored()
        self.weights_loaded(masters=True)

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which frozen parameters, which stage 3 partitions, are whole. All ranks enter it.

        Args:
            model: The model of the engine.
            write: Whether values that are written in the context are kept; rank 0's values count.
        """
        if hasattr(self._zero, "_partition_all_parameters"):
            self._zero._partition_all_parameters()
        parted = [p for p in model.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(parted, modifier_rank=0 if write else None, enabled=bool(parted)):
            yield

    @property
    def _group_of(self) -> dict[str, dict[str, Any]]:
        """The group of each parameter, by its name."""
        return {name: group for group in self.param_groups for name in group["parameters"]}

    def _count_on(self) -> None:
        """Copy the loaded step counts of the groups into the Muons whose rule counts steps."""
        groups = self._group_of
        for muon in self.muons:
            for number, inner in enumerate(muon.param_groups):
                if rule_of(inner).counts_steps:
                    name = next(member.name for member in placed_members(muon) if member.group == number)
                    inner["steps_taken"] = groups[name].get("steps_taken", 0)

    # ---------------------------------------------------------------- reports

    def explain(self) -> Explanation:
        """Return an explanation of a step of the engine, as `muonmesh.Muon.explain` does; no communication."""
        explanations = [muon.explain() for muon in self.muons]
        rows = (row for part in explanations for row in part.rows)
        names = ("orthogonalizations", "collectives", "bytes_sent", "bytes_received", "state_bytes", "host_bytes")
        return Explanation(
            rows=tuple(replace(row, reason=self._reasons[row.parameter]) for row in rows),
            rank=this_rank(),
            flops={rank: sum(part.flops.get(rank, 0) for part in explanations) for rank in range(world_size())},
            budget_bytes=max(part.budget_bytes for part in explanations),
            alone=sum(part.alone for part in explanations),
            **{name: sum(getattr(part, name) for part in explanations) for name in names},
        )
