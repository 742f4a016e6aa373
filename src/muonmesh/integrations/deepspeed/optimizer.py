"""EngineMuon: the optimizer that DeepSpeed holds; it steps whichever tensors the engine shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from muonmesh.checkpoint.group_settings import OWN_KEYS
from muonmesh.checkpoint.of_muon import OfMuon
from muonmesh.checkpoint.record import Record
from muonmesh.clip.limits import GradNorms, Limits
from muonmesh.errors import LayoutError, StateError, explain_error
from muonmesh.integrations.deepspeed.calls import Call, Calls
from muonmesh.integrations.deepspeed.checkpoint import engine_records, expert_names, publish
from muonmesh.integrations.deepspeed.clipping import clip, measure
from muonmesh.layout.matrix import as_tuples
from muonmesh.numerics.rules import is_matrix_rule, rule_of, step_count

_IDENTITY = ("name", "algorithm", "parameters", "matrices")
"""Keys of a group that say what it is; no checkpoint may change them."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of every tensor that DeepSpeed's tools know, besides ``step``."""

_AS_SAVED = "Make the engine with the same model and optimizer= settings as when it was saved"


def kept_as_moments(group: Mapping[str, Any]) -> Mapping[str, str]:
    """Return which of DeepSpeed's moments has what, by the rule's name for it.

    A momentum that the owners of matrices have is not among them: it has another shape than the flat tensor.
    """
    keeps = rule_of(group).keeps()
    if not is_matrix_rule(group["algorithm"]):
        return {key: key for key in _MOMENTS if key in keeps}
    return {"momentum_buffer": "exp_avg"} if keeps.get("momentum_buffer") == "momentum" else {}


class EngineMuon(torch.optim.Optimizer):
    """Muon and AdamW for a DeepSpeed engine, which gives them flat fp32 tensors instead of parameters.

    1. DeepSpeed makes it inside the engine, replaces the parameters in its groups by tensors of its own and, at
       stage 0, steps it once with zero gradients; nothing happens then.
    2. `initialize` reads the engine's records and hands over the calls: `bind`.
    3. Each ``engine.step()`` steps it once for all groups (stage 0, `BF16_Optimizer`), once for each group (stages 1
       and 2) or for each sub-group (stage 3), with the others hidden. All ranks run the same calls in the same order.

    State is presented as DeepSpeed's tools know it: ``step``, ``exp_avg`` (of matrices their momentum, if each rank has
    that of its elements) and ``exp_avg_sq``; what a rule for matrices does not keep is zeros that take no memory. Its
    other state lies beside them under its own names. Settings are those of the groups at each step, so that schedulers
    work.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(list(groups), dict(defaults))
        self._identities = [{key: group[key] for key in _IDENTITY} for group in self.param_groups]
        self.awaits: Any = None
        self.calls: tuple[Call, ...] = ()
        self.norms: GradNorms | None = None
        self._call_of: dict[int, tuple[Call, dict[str, Any]]] = {}
        self._limits: Limits | None = None
        self._coefficients: dict[int, Tensor] = {}
        self._engine: Any = None

    def bind(self, calls: Sequence[Call], limits: Limits | None, engine: Any) -> None:
        """Hand over what the engine steps, how it is clipped, and the engine; create the state."""
        self.calls, self._engine = tuple(calls), engine
        # Neither stage 0 nor every wrapper has it, and Accelerate looks for it once, when the engine has been made.
        self._zero.overflow = False
        if limits is not None:
            self.clip_by(limits)
        for call in calls:
            for group in call.muon.param_groups:
                for tensor in group["params"]:
                    self._call_of[id(tensor)] = call, group
                    moments = {key: torch.zeros_like(tensor, requires_grad=False) for key in _MOMENTS}
                    self.state[tensor] = {"step": step_count(0.0), **moments}
        self.release_unused()

    def _matrices(self, *calls: Call) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield the tensors of some calls that hold matrices, each with its group there."""
        for call in calls:
            for group in call.muon.param_groups:
                for tensor in group["params"] if is_matrix_rule(group["algorithm"]) else ():
                    yield group, tensor

    def clip_by(self, limits: Limits) -> None:
        """Clip and skip from the next step on, in place of the engine, whose own clipping ends.

        After a step that changed nothing ``engine.optimizer.overflow`` is True, DeepSpeed's word for it: the engine
        then counts a skipped step and leaves its schedule where it is.
        """
        self._engine._config.gradient_clipping = 0.0  # read at each step at stage 0
        if hasattr(self._zero, "clip_grad"):
            self._zero.clip_grad = 0.0
        self._limits, self.norms = limits, None

    @property
    def _zero(self) -> Any:
        """What wraps this in the engine, or this."""
        return self._engine.optimizer

    def release_unused(self) -> None:
        """Make moments that no matrix has, but that DeepSpeed's tools want to see, zeros without memory."""
        for group, tensor in self._matrices(*self.calls):
            zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            unused = set(_MOMENTS) - set(kept_as_moments(group).values())
            self.state[tensor].update(dict.fromkeys(unused, zero.expand(tensor.shape)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the tensors that DeepSpeed shows; all ranks that share their parameters do.

        Raises:
            ValueError: there is a closure, which DeepSpeed does not know either.
            LayoutError: DeepSpeed shows a tensor that its records did not name.
        """
        if closure is not None:
            write = "Call it before: DeepSpeed evaluates the model before the step"
            raise ValueError(explain_error("closure", "one", "none", write))
        if not self.calls:
            return  # the engine is still being made
        shown = [(group, *self._find(tensor)) for group in self.param_groups for tensor in group["params"]]
        for group, _, inner in shown:
            inner.update({key: group[key] for key in inner.keys() - {*OWN_KEYS, "steps_taken"}})
        visible = list(dict.fromkeys(call for _, call, _ in shown))
        if self._limits is not None and self.calls[0] in visible:
            self.norms, self._coefficients = measure(self._limits, self._zero, self.calls, visible)
        for call in visible:
            self._run(call)
        for group, _, inner in shown:
            group.update({key: value for key, value in inner.items() if key == "steps_taken"})
        if self.calls[-1] in visible and self.norms is not None:
            self._zero.overflow = bool(self.norms.skipped)

    def _find(self, tensor: Tensor) -> tuple[Call, dict[str, Any]]:
        if id(tensor) not in self._call_of:
            found = f"a tensor of {tensor.numel()} elements to step that its records did not name"
            write = "Make the engine with muonmesh.integrations.deepspeed.initialize, and anew after changing it"
            raise LayoutError(explain_error("DeepSpeed", found, "the tensors it had when the engine was made", write))
        return self._call_of[id(tensor)]

    def _run(self, call: Call) -> None:
        self._take(call)
        if self.norms is not None and bool(self.norms.skipped):
            return
        if self._limits is not None:
            clip(call, self._limits, self._coefficients)
        call.muon.step()
        self._show(call, steps=1)

    def _take(self, call: Call) -> None:
        """Give a call the state that DeepSpeed sees, which it may have loaded, moved or replaced."""
        for group in call.muon.param_groups:
            for tensor in group["params"]:
                state = self.state[tensor]
                # DeepSpeed loads one count for all tensors: a number, or a tensor that AdamW would count up for each.
                state["step"] = step_count(state["step"]).to(tensor.device)  # torch's fused kernels want it there
                if is_matrix_rule(group["algorithm"]):
                    kept = {key: value for key, value in state.items() if key not in ("step", *_MOMENTS)}
                    kept |= {key: state[shown] for key, shown in kept_as_moments(group).items()}
                    call.muon.state[tensor] = kept
                else:
                    call.muon.state[tensor] = state

    def _show(self, call: Call, *, steps: int = 0) -> None:
        """Let DeepSpeed see what a call has as state of its matrices, and that so many steps more have made it."""
        for group, tensor in self._matrices(call):
            shown = kept_as_moments(group)
            self.state[tensor].update({shown.get(key, key): value for key, value in call.muon.state[tensor].items()})
            self.state[tensor]["step"] += steps

    # ---------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings, as DeepSpeed does for a checkpoint of the same world size.

        Raises:
            StateError: the state is of other groups than these; nothing has been loaded.
        """
        self.check_groups(state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self._count_on()
        self.release_unused()
        if self.calls:
            self._zero._hp_optimizer_states_linked = False  # DeepSpeed links what it shows of them at the next step

    def state_dict(self) -> dict[str, Any]:
        """Return state and settings.

        Raises:
            StateError: a step was interrupted while it wrote.
        """
        self.refuse_if_interrupted()
        return super().state_dict()

    def refuse_if_interrupted(self) -> None:
        """Raise StateError if a step or a load was interrupted while it wrote, and no state has been loaded since."""
        for call in self.calls:
            OfMuon(call.muon).refuse_if_interrupted()

    def check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateError unless saved groups are what these are: algorithm, parameters and splits."""
        if len(saved) != len(self._identities):
            found, needed = f"{len(saved)} param groups", f"{len(self._identities)}"
            raise StateError(explain_error("the state", found, needed, _AS_SAVED))
        for identity, group in zip(self._identities, saved, strict=True):
            for key, needed in identity.items():
                if key == "matrices" and not is_matrix_rule(identity["algorithm"]):
                    continue
                if as_tuples(group.get(key)) != as_tuples(needed):
                    where, found = f"group {identity['name']!r}", f"{key} {group.get(key)!r} in the state"
                    raise StateError(explain_error(where, found, f"{needed!r}", _AS_SAVED))

    def checkpoint_records(self) -> list[Record]:
        """Return every parameter with its state, for `muonmesh.checkpoint`; no communication."""
        for call in self.calls:
            self._take(call)
        return list(engine_records(self.calls, self.param_groups))

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return what a checkpoint calls the experts of this rank, by the names that the model has for them."""
        return expert_names(model)

    def checkpoint_changing(self) -> None:
        """Take note that `muonmesh.checkpoint.load` begins to write."""
        for call in self.calls:
            OfMuon(call.muon).checkpoint_changing()

    def checkpoint_restored(self) -> None:
        """Let the engine compute with the weights that `muonmesh.checkpoint.load` has written."""
        self._count_on()
        counts = [float(state["step"]) for state in self.state.values() if "step" in state]
        for call in self.calls:
            OfMuon(call.muon).checkpoint_restored()
            self._show(call)
        for _, tensor in self._matrices(*self.calls):
            self.state[tensor]["step"] = step_count(max(counts, default=0.0))  # nothing of ours asks
        self.release_unused()
        publish(self._zero)

    def whole(self, model: nn.Module, *, write: bool) -> AbstractContextManager[Any]:
        """Return a context in which frozen parameters are whole, which stage 3 has partitioned; all ranks enter it."""
        if hasattr(self._zero, "_partition_all_parameters"):
            self._zero._partition_all_parameters()
        parted = [p for p in model.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            parted, modifier_rank=0 if write else None, enabled=bool(parted)
        )
        return context

    def _count_on(self) -> None:
        """Let calls whose rule counts steps go on from what the groups have loaded."""
        group_of = {name: group for group in self.param_groups for name in group["parameters"]}
        for call in self.calls:
            for inner in call.muon.param_groups:
                if rule_of(inner).counts_steps:
                    name = next(iter(call.layouts or inner["param_names"]))
                    inner["steps_taken"] = group_of[name].get("steps_taken", 0)

    # ---------------------------------------------------------------- telling

    def explain(self) -> Calls:
        """Return what a step of the engine does, call by call, with the balance of each; no communication."""
        return Calls({call.title: call.explain() for call in self.calls})
