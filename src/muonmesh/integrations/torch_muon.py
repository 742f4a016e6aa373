"""torch.optim.Muon in every layout: with `execute`, muonmesh takes the steps of a torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import _muon as torchs  # its iteration and its scale, for the same bits
from torch.optim.optimizer import _disable_dynamo_if_unsupported

from muonmesh.clip.limits import GradNorms
from muonmesh.errors import explain_error
from muonmesh.numerics.rules import MuonRule, register_rule
from muonmesh.optimizer import Muon
from muonmesh.settings import ProcessGroup

ALGORITHM = "torch.optim.Muon"


@register_rule(ALGORITHM)
@dataclass(frozen=True, slots=True)
class TorchRule(MuonRule):
    """The rule of torch.optim.Muon: torch's own functions orthogonalize and scale whole matrices.

    The settings have other names than in torch, so that torch's names in a group still lead to an error that gives
    muonmesh's names.
    """

    orthogonalizes: ClassVar[bool] = False

    torch_coefficients: tuple[float, float, float] = (torchs.DEFAULT_A, torchs.DEFAULT_B, torchs.DEFAULT_C)
    torch_steps: int = torchs.DEFAULT_NS_STEPS
    torch_eps: float = torchs.EPS
    torch_adjust: str | None = None

    def whole(self, update: Tensor, state: Any) -> Tensor:
        """Return the result of torch's Newton–Schulz iteration, in bf16, of each matrix, in the dtype of ``update``."""
        how = self.torch_coefficients, self.torch_steps, self.torch_eps
        return torch.stack([torchs._zeropower_via_newtonschulz(one, *how) for one in update]).to(update.dtype)

    def scale(self, rows: int, cols: int) -> float:
        """Return torch's factor of the learning rate for a matrix of this shape."""
        return float(torchs._adjust_lr(1.0, self.torch_adjust, torch.Size((rows, cols))))

    def flops(self, rows: int, cols: int) -> int:
        """Return the floating-point operations of the matrix products of the iteration."""
        side, other = sorted((rows, cols))
        return self.torch_steps * (4 * side * side * other + 2 * side**3)


class ExecutedMuon(torch.optim.Muon):
    """A torch.optim.Muon after a call of `execute`: muonmesh takes its steps."""

    _step_supports_amp_scaling = True  # as of `Muon`: all ranks skip together
    _executor: Muon | None = None
    _process_group: ProcessGroup = "auto"

    @property
    def executor(self) -> Muon:
        """The `Muon` that takes the steps, with the settings and state of this optimizer; made at its first use."""
        held = [[id(parameter) for parameter in group["params"]] for group in self.param_groups]
        made = self._executor
        if made is None or held != [[id(p) for p in group["params"]] for group in made.param_groups]:
            made = self._executor = self._made()
        for group, theirs in zip(made.param_groups, self.param_groups, strict=True):
            group.update({key: theirs[key] for key in ("lr", "weight_decay", "momentum", "nesterov")})
            group |= {"torch_coefficients": tuple(theirs["ns_coefficients"]), "torch_steps": theirs["ns_steps"]}
            group |= {"torch_eps": theirs["eps"], "torch_adjust": theirs["adjust_lr_fn"]}
        made.state = self.state
        return made

    def _made(self) -> Muon:
        dtypes = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        if len(dtypes) > 1:
            found = f"parameters of {' and '.join(sorted(map(str, dtypes)))}"
            write = "Make an optimizer for the parameters of each dtype"
            raise TypeError(explain_error("execute", found, "one dtype, which the momentum has", write))
        names = ("params", "param_names")
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(self.param_groups):
            known = {key: list(group[key]) for key in names if key in group}
            groups.append({**known, "name": f"group{number}", "algorithm": ALGORITHM})
        made = Muon(groups, state_dtype=dtypes.pop(), process_group=self._process_group)
        made._runtime.warned.add("rounding")  # about bf16 weights: torch.optim.Muon has no master weights either
        return made

    @_disable_dynamo_if_unsupported()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as `Muon.step`. All ranks that share parameters call it."""
        made = self.executor
        for told in ("grad_scale", "found_inf"):  # set by a GradScaler for the time of the call
            vars(made).pop(told, None)
            if told in vars(self):
                setattr(made, told, vars(self)[told])
        return made.step(closure)

    def clip_grad_norm_(self, max_norm: float, **settings: Any) -> GradNorms:
        """Clip the gradients by their norm over all ranks, as `Muon.clip_grad_norm_`."""
        return self.executor.clip_grad_norm_(max_norm, **settings)


def execute(optimizer: torch.optim.Optimizer, *, process_group: ProcessGroup = "auto") -> ExecutedMuon:
    """Let muonmesh take the steps of a torch.optim.Muon, so that it orthogonalizes whole matrices in every layout.

    The optimizer stays the same object, with its settings, momentum and ``state_dict()``, so schedulers need no change.
    One rank gathers each matrix and orthogonalizes it with torch's own function. As in torch, a parameter is one matrix
    or a batch of matrices: fused matrices are not split.

    Args:
        optimizer: The torch.optim.Muon. If its groups have "param_names", all ranks know the parameters by these names.
        process_group: The ranks that hold plain matrices, as for `Muon`.

    Returns:
        The same optimizer.

    Raises:
        TypeError: the optimizer is no torch.optim.Muon, or was patched. Schedulers patch ``step``, so create them after
            this call.
    """
    if type(optimizer) not in (torch.optim.Muon, ExecutedMuon):
        write = "Write muonmesh.from_model(model, **muonmesh.convert_settings(optimizer))"
        raise TypeError(explain_error("execute", f"a {type(optimizer).__name__}", "a torch.optim.Muon", write))
    if "step" in vars(optimizer):
        found, write = "an optimizer whose step was replaced, as schedulers do", "Call execute before you make them"
        raise TypeError(explain_error("execute", found, "one whose step is torch's", write))
    optimizer.__class__ = ExecutedMuon
    assert isinstance(optimizer, ExecutedMuon)
    optimizer._patch_step_function()  # as torch's constructor does, for hooks
    optimizer._process_group, optimizer._executor = process_group, None
    return optimizer
