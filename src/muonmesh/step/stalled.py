"""Stalled: parameters that learn nothing while others train, told once by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from weakref import ReferenceType

from torch import Tensor, nn

from muonmesh.errors import LayoutError, explain_error, warn
from muonmesh.groups.sites import sites

PATIENCE = 100
"""Steps without a gradient after which a parameter is told of, and between two looks at the model."""


@dataclass
class Stalled:
    """How long the parameters of an optimizer have had no gradient.

    Attributes:
        model: Whose parameters the groups were made of, if that is known.
        frozen: The names of parameters that were frozen then.
    """

    model: ReferenceType[nn.Module] | None = None
    frozen: Collection[str] = ()
    _steps: int = 0
    _idle: dict[str, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _looked_at: set[str] = field(default_factory=set)

    def replaced(self, missing: Mapping[str, Tensor]) -> LayoutError | None:
        """Return the error of parameters without a gradient in whose place the model now trains others.

        The model is looked at when a parameter has no gradient for the first time, and again after `PATIENCE` steps.

        Args:
            missing: The parameters without a gradient, by name.
        """
        fresh = missing.keys() - self._looked_at
        model = None if self.model is None or not fresh else self.model()
        if model is None:
            return None
        self._looked_at |= fresh
        others = {site.name: site.parameter for site in sites(model) if site.name in fresh}
        others = {name: other for name, other in others.items() if other is not missing[name]}
        self._looked_at -= others.keys()
        names = [name for name, other in others.items() if other.grad is not None]
        if not names:
            return None
        found = "no gradient, while the model now holds another parameter of this name, which has one"
        write = "Make the optimizer after what replaces parameters: fully_shard, parallelize_module, to_empty"
        return LayoutError(explain_error(_listed(names), found, "the parameters that the model trains", write))

    def count(self, missing: Mapping[str, Tensor], *, some: bool) -> None:
        """Count one step, and warn of what has learned nothing for long.

        Args:
            missing: The parameters without a gradient, by name.
            some: Whether others had one.
        """
        self._idle = {name: self._idle.get(name, 0) + 1 for name in missing}
        late = [name for name, steps in self._idle.items() if steps == PATIENCE and name not in self._told]
        fixed = [name for name, parameter in missing.items() if not parameter.requires_grad]
        if self._steps == 0 and not some and fixed and len(fixed) == len(missing):  # a host froze it, for adapters
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
        if self._steps % PATIENCE == 0:
            self._looked_at.clear()
            self._look_at_frozen()
        self._steps += 1

    def _look_at_frozen(self) -> None:
        model = None if self.model is None or not self.frozen else self.model()
        found = [] if model is None else [site.name for site in sites(model) if site.parameter.requires_grad]
        fresh = [name for name in found if name in self.frozen and name not in self._told]
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
