"""Stalled: parameters that learn nothing while others train, told once by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import ReferenceType

from torch import Tensor, nn

from muonmesh.errors import warn

PATIENCE = 100
"""Steps without a gradient after which a parameter is told of, and between two looks at frozen ones."""


@dataclass
class Stalled:
    """How long the parameters of an optimizer have had no gradient.

    Attributes:
        frozen: Parameters that were frozen when the groups were made, by name.
    """

    frozen: Mapping[str, ReferenceType[nn.Parameter]] = field(default_factory=dict)
    _steps: int = 0
    _idle: dict[str, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def count(self, parameters: Iterable[tuple[str, Tensor, Tensor | None]]) -> None:
        """Count one step of (name, parameter, gradient or None), and warn of what has learned nothing for long."""
        idle, late, some, fixed = self._idle, list[str](), False, list[str]()
        for name, parameter, gradient in parameters:
            if gradient is not None:
                some = True
                if name in idle:
                    del idle[name]
            elif (steps := idle.get(name, 0) + 1) <= PATIENCE:
                idle[name] = steps
                if steps == PATIENCE and name not in self._told:
                    late.append(name)
                if self._steps == 0 and not parameter.requires_grad:
                    fixed.append(name)
        if not some and fixed and len(fixed) == len(idle):  # a host has frozen the model since, for adapters
            self._told.update(fixed)
            warn(
                f"{_listed(fixed)} are all that this optimizer holds, and they are frozen, so nothing is trained. "
                "Make the optimizer after the model has its adapters: "
                "muonmesh.from_model(get_peft_model(model, config)), or for a Trainer optimizer_cls_and_kwargs="
                '(muonmesh.integrations.transformers.MuonFactory, {"args": args})'
            )
        if late:
            self._told.update(late)
            it, does = ("it", "does") if len(late) == 1 else ("them", "do")
            others = "others had one" if some else "nothing else had one either"
            replaced = "" if some else "; make the optimizer after what replaces parameters (FSDP1, deepcopy, PEFT)"
            warn(
                f"{_listed(late)} had no gradient in the last {PATIENCE} steps, in which {others}, and {does} not "
                f"learn. Find out who froze or skipped {it}, or leave {it} out of the groups{replaced}"
            )
        if self.frozen and self._steps % PATIENCE == 0:
            self._look_at_frozen()
        self._steps += 1

    def _look_at_frozen(self) -> None:
        found = [name for name, held in self.frozen.items() if (p := held()) is not None and p.requires_grad]
        fresh = [name for name in found if name not in self._told]
        if fresh:
            self._told.update(fresh)
            warn(
                f"{_listed(fresh)} {'was' if len(fresh) == 1 else 'were'} frozen when the optimizer was made and "
                f"{'has' if len(fresh) == 1 else 'have'} been unfrozen since, but no optimizer trains "
                f'{"it" if len(fresh) == 1 else "them"}. Write optimizer.add_param_group({{"params": [...], '
                '"param_names": [...], "algorithm": "muon" or "adamw"})'
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
