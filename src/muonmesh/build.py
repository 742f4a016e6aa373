"""Build: `from_model`, and the public `split_params`; an error on one rank is raised on the other ranks too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Unpack

from torch import Tensor, nn

from muonmesh.comm.rendezvous import announcing_failure
from muonmesh.comm.wrappers import average_instead, group_of_wrapper
from muonmesh.errors import calling, explain_error, warn
from muonmesh.groups import Example
from muonmesh.groups import split_params as split_locally
from muonmesh.groups.parameter_sites import Matrices
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.numerics.scale import update_scale
from muonmesh.optimizer import Muon
from muonmesh.settings import MuonSettings, shows_settings

LARGE_RATE = 0.01
"""From here on, a learning rate is larger than AdamW's usually are, and as large as other Muons' are."""

split_params = announcing_failure()(split_locally)
"""`muonmesh.groups.split_params`. With several ranks, the other ranks learn of an error at their first step."""


@shows_settings
def from_model(
    model: nn.Module = None,  # type: ignore[assignment]
    lr: float | Tensor = 3e-4,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    rule: str = "muon",
    example: Example | None = None,
    watch: bool = True,
    **settings: Unpack[MuonSettings],
) -> Muon:
    """Return a `Muon` for a model: Muon for its matrices, AdamW for embeddings, heads and vectors.

    The result is ``Muon(split_params(model), lr=lr, ...)``. It replaces ``AdamW(model.parameters(), lr=lr)``.

    Args:
        model: Any module, sharded or not.
        lr: Learning rate of Muon and AdamW.
        muon: Settings of Muon's groups alone, such as ``{"lr": 6e-4}``; see `split_params`.
        adamw: Settings of AdamW's groups alone; see `split_params`.
        overrides: Other rules or settings for single parameters, by name; see `split_params`.
        rule: The rule of the matrices: "muon", "normuon", another rule of muonmesh, or a name given to `register_rule`.
        example: One forward of the model, from which the groups are read: its arguments as a tuple, its keyword
            arguments as a dict, or a function that returns its loss; see `split_params`.
        watch: Whether the first training forward is compared with what was guessed; see `split_params`.
        settings: Further arguments of `Muon`, such as ``momentum``, ``weight_decay`` and ``process_group``, which its
            docstring describes. If ``model`` is a DistributedDataParallel, its process group is the default of
            ``process_group``.

    Raises:
        ValueError, TypeError: as `split_params` and `Muon`. With several ranks, the other ranks learn of the error at
            their first step.
    """
    missing: object = model
    if missing is None:  # a Trainer first calls this function, as a factory, without arguments
        write = "Write muonmesh.from_model(model, lr=...), or for a Trainer optimizer_cls_and_kwargs="
        write += '(muonmesh.integrations.transformers.MuonFactory, {"args": args})'
        raise TypeError(explain_error("from_model", "no model", "the model", write))
    with calling("from_model"), announcing_failure(alone=settings.get("process_group") == "local"):
        split: dict[str, Any] = {"muon": muon, "adamw": adamw, "overrides": overrides}
        groups = split_locally(model, **split, example=example, watch=watch)
        for group in groups:
            if group["algorithm"] == "muon":
                group["algorithm"] = rule
        if settings.get("process_group") is None:
            settings["process_group"] = group_of_wrapper(model)
        optimizer = Muon(groups, lr, **settings)
        if settings.get("gradients") == "to_owners":
            average_instead(optimizer.gradients, model)
        if "scale_mode" not in {**settings, **(muon or {})}:
            _warn_of_rate(optimizer)
    return optimizer


def _dims(shape: Sequence[int], matrices: Matrices) -> tuple[int, int]:
    """Return the rows and columns of a parameter, of which a stack has several; a convolution is out × the rest."""
    flat = "flatten" in (matrices, matrices[0])
    return (shape[0], prod(shape[1:])) if flat else (shape[-2], shape[-1])


def _warn_of_rate(optimizer: Muon) -> None:
    """Warn of a learning rate as other Muons take it: with the default scale, the steps of wide matrices are larger."""
    for group in optimizer.param_groups:
        lr, scale = group["lr"], group.get("scale_mode")
        if not is_matrix_rule(group["algorithm"]) or scale != "match_rms_adamw" or not isinstance(lr, float | int):
            continue
        stored = zip(group["params"], group["matrices"], strict=True)
        shapes = {_dims(tensor.shape, matrices) for tensor, matrices in stored if tensor.ndim > 1 and tensor.numel()}
        times = max((update_scale(*shape, scale) / update_scale(*shape, "original") for shape in shapes), default=0.0)
        if lr >= LARGE_RATE and times >= 2:
            problem = f"{lr:g} with the default scale, which makes steps up to {times:.0f} times as large as those of "
            problem += "torch.optim.Muon and KellerJordan/Muon at this rate"
            write = f'Write from_model(model, lr=3e-4, muon={{"lr": {lr:g}}}, scale_mode="original"), or '
            write += 'scale_mode="match_rms_adamw" if you mean this rate'
            warn(explain_error("lr", problem, "AdamW's rate, such as 3e-4, or another scale", write))
            return
