"""StateKeys: the keys of another optimizer's state, and the translation of this state to muonmesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonmesh.errors import StateError, explain_error
from muonmesh.files import is_finite
from muonmesh.numerics.dtypes import HELD_DTYPES, NEEDED_HELD
from muonmesh.numerics.rules import step_count


class ParameterState(NamedTuple):
    """The state of one parameter, with muonmesh's keys.

    Attributes:
        algorithm: "muon" or "adamw", the algorithm to which the state belongs.
        state: "momentum_buffer", an average, for Muon; "exp_avg", "exp_avg_sq" and "step", 0-d fp32, for AdamW. Tensors
            have the shape in which the other optimizer keeps them.
    """

    algorithm: str
    state: dict[str, Tensor]


@dataclass(frozen=True)
class StateKeys:
    """The keys under which one package keeps the state of a parameter.

    A sum of gradients ``M ← μM + g`` is 1/(1 − μ) times the average ``m ← μm + (1 − μ)g`` of the same gradients. The
    same factor lies between the Nesterov directions ``g + μM`` and ``(1 − μ)g + μm``. So if muonmesh starts with the
    average (1 − μ)M, all further steps have the same directions.

    Attributes:
        momentum: The key of a matrix's momentum.
        sums: Whether the momentum is a sum of gradients, and not an average.
        factor: The key of μ in a group.
        first: The key of AdamW's first moment.
        second: The key of AdamW's second moment.
        count: The key of AdamW's step count. If it is missing, "step" of the group is read.
        beside: Keys that change no step of Muon, such as counts.
    """

    momentum: str = "momentum_buffer"
    sums: bool = False
    factor: str = "momentum"
    first: str = "exp_avg"
    second: str = "exp_avg_sq"
    count: str = "step"
    beside: frozenset[str] = frozenset({"step"})

    def read(self, name: str, group: Mapping[str, Any], entry: Mapping[str, Any]) -> ParameterState:
        """Return the state of one parameter, with muonmesh's keys.

        Args:
            name: The name of the parameter, for messages.
            group: The saved group of the parameter.
            entry: The saved state of the parameter, not empty.

        Raises:
            StateError: the saved state is incomplete, or has values that no step of Muon or AdamW leaves.
        """
        is_adamw = self.second in entry
        needed = (self.first, self.second) if is_adamw else (self.momentum,)
        held = {key: entry.get(key) for key in needed}
        missing = [key for key, value in held.items() if not (isinstance(value, Tensor) and value.dtype in HELD_DTYPES)]
        if missing:
            kinds = {str(key): getattr(value, "dtype", type(value).__name__) for key, value in entry.items()}
            found = "state " + ", ".join(f"{key!r} ({kind})" for key, kind in sorted(kinds.items()))
            wanted = f"{self.momentum!r} of a matrix, or {self.first!r} and {self.second!r} of AdamW's, "
            write = "Save the state after a step, and convert other dtypes with .float()"
            raise StateError(explain_error(name, found, f"{wanted}in {NEEDED_HELD}", write))
        strangers = sorted(map(str, entry.keys() - {*needed, *self.beside, *((self.count,) if is_adamw else ())}))
        if strangers:
            found = f"{strangers[0]!r} in its state, which belongs to another rule"
            write = "Begin without that state: train on with a new optimizer, its settings from convert_settings"
            raise StateError(explain_error(name, found, f"{', '.join(needed)} and a count of steps alone", write))
        if not is_adamw:
            momentum = entry[self.momentum].detach()
            return ParameterState("muon", {"momentum_buffer": self._average(name, group, momentum)})
        count = _number(entry.get(self.count, group.get("step")))
        if count is None:
            found = "no count of AdamW's steps"
            wanted = f"{self.count!r} in its state or 'step' in its group, for the bias correction"
            raise StateError(explain_error(name, found, wanted, f'Write state["{self.count}"] = the number of steps'))
        step = step_count(count)
        state = {"step": step, "exp_avg": entry[self.first].detach(), "exp_avg_sq": entry[self.second].detach()}
        return ParameterState("adamw", state)

    def _average(self, name: str, group: Mapping[str, Any], momentum: Tensor) -> Tensor:
        if not self.sums:
            return momentum
        factor = _number(group.get(self.factor))
        if factor is None or factor >= 1:
            found, needed = f"{self.factor} {factor} in its group", "μ in [0, 1), by which gradients were summed"
            raise StateError(explain_error(name, found, needed, f'Write group["{self.factor}"] = 0.95, or what it was'))
        return momentum.to(torch.promote_types(momentum.dtype, torch.float32)) * (1 - factor)


def _number(value: Any) -> float | None:
    """Return a finite number of at least 0, plain or as a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if is_finite(value) and value >= 0 else None
