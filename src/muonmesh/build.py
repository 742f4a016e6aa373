"""From a model to its optimizer: `from_model`, and `split_params`, whose errors the other ranks learn of."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from muonmesh.comm.gradients import GradientSource
from muonmesh.comm.meeting import note_failure
from muonmesh.comm.storage import Declared
from muonmesh.comm.wrappers import group_of_wrapper, leave_gradients
from muonmesh.errors import explain_error
from muonmesh.groups import HeadPart, ParamGroups
from muonmesh.groups import split_params as split_locally
from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.newton_schulz import Method
from muonmesh.numerics.rules import DecayMode
from muonmesh.numerics.scale import ScaleMode
from muonmesh.optimizer import Muon
from muonmesh.settings import (
    ADAMW_BETAS,
    ADAMW_EPS,
    KernelName,
    ProcessGroup,
    StateDevice,
    StateDtype,
    TorchsArguments,
)


@functools.wraps(split_locally)
def split_params(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    per_head: bool | Collection[HeadPart] = False,
) -> ParamGroups:
    """`muonmesh.groups.split_params`; where several ranks run, the others learn of an error at their first step."""
    try:
        return split_locally(model, muon=muon, adamw=adamw, overrides=overrides, per_head=per_head)
    except Exception as error:
        note_failure(error)
        raise


def from_model(
    model: nn.Module = None,  # type: ignore[assignment]
    lr: float | Tensor = 3e-4,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    per_head: bool | Collection[HeadPart] = False,
    rule: str = "muon",
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    decay_mode: DecayMode = "full",
    scale_mode: ScaleMode = "match_rms_adamw",
    extra_scale_factor: float = 1.0,
    ns_coefficients: Coefficients = "polar_express",
    ns_steps: int | None = None,
    ns_method: Method = "auto",
    adamw_betas: tuple[float, float] = ADAMW_BETAS,
    adamw_eps: float = ADAMW_EPS,
    compute_dtype: torch.dtype = torch.bfloat16,
    kernels: KernelName = "auto",
    state_dtype: StateDtype = torch.float32,
    state_device: StateDevice = None,
    master_dtype: torch.dtype | None = None,
    process_group: ProcessGroup = None,
    layouts: Mapping[str, Declared] | None = None,
    shard_state: bool = False,
    bucket_cap_mb: float = 16.0,
    gradients: GradientSource | Literal["to_owners"] | None = None,
    **others: Unpack[TorchsArguments],
) -> Muon:
    """Return ``Muon(split_params(model), lr=lr, ...)``: the line that replaces ``AdamW(model.parameters(), lr=lr)``.

    Args:
        model: Any module, sharded or not.
        lr: Learning rate of both halves.
        muon: Settings of Muon's groups alone, as `split_params` takes them.
        adamw: Settings of AdamW's groups alone, likewise.
        overrides: Which parameters are treated otherwise, likewise.
        per_head: Which attention weights are one matrix for each head, likewise.
        rule: How matrices are stepped: "muon", "normuon", "adamuon", or the name of a rule given to `register_rule`.
        momentum: How much of the momentum stays. Like what follows, an argument of `Muon`, whose docstring says more.
        nesterov: Whether to look ahead with the momentum.
        weight_decay: Of both halves; norms, biases and other vectors have none.
        decay_mode: Which weights decay.
        scale_mode: How large an update is, see `update_scale`.
        extra_scale_factor: Multiplies that.
        ns_coefficients: Newton–Schulz coefficients, see `orthogonalize`.
        ns_steps: Newton–Schulz steps; None: what the coefficients are made for.
        ns_method: Newton–Schulz method.
        adamw_betas: AdamW's decay rates of the moments.
        adamw_eps: AdamW's ε.
        compute_dtype: Dtype of orthogonalisation and wire.
        kernels: What multiplies.
        state_dtype: Dtype of the momentum.
        state_device: "cpu" keeps state on the host.
        master_dtype: Of masters of lower-precision parameters.
        process_group: Who holds plain matrices: "world", "local", "auto" or a ProcessGroup; None: those of the
            DistributedDataParallel that ``model`` is, if it is one.
        layouts: Where plain local shards live, by name.
        shard_state: Whether replicas share the momentum.
        bucket_cap_mb: MiB of matrices that one owner computes at a time.
        gradients: Where gradients are kept if not in ``parameter.grad``. "to_owners": Muon averages them itself, and
            a DistributedDataParallel around the model does not any more.
        others: ``betas`` and ``eps``, by which torch.optim.AdamW calls ``adamw_betas`` and ``adamw_eps``.

    Raises:
        ValueError, TypeError: as `split_params` and `Muon`. Where several ranks run, the others learn of it at their
            first step.
    """
    missing: object = model
    if missing is None:  # a Trainer calls what it takes for a factory without arguments first
        write = "Write muonmesh.from_model(model, lr=...), or for a Trainer optimizer_cls_and_kwargs="
        write += '(muonmesh.integrations.transformers.MuonFactory, {"args": args})'
        raise TypeError(explain_error("from_model", "no model", "the model", write))
    try:
        groups = split_locally(model, muon=muon, adamw=adamw, overrides=overrides, per_head=per_head)
    except Exception as error:
        if process_group != "local":
            note_failure(error)
        raise
    for group in groups:
        if group["algorithm"] == "muon":
            group["algorithm"] = rule
    if process_group is None:
        process_group = group_of_wrapper(model)
    if gradients == "to_owners":
        leave_gradients(model)
    return Muon(
        groups,
        lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        decay_mode=decay_mode,
        scale_mode=scale_mode,
        extra_scale_factor=extra_scale_factor,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        ns_method=ns_method,
        adamw_betas=adamw_betas,
        adamw_eps=adamw_eps,
        compute_dtype=compute_dtype,
        kernels=kernels,
        state_dtype=state_dtype,
        state_device=state_device,
        master_dtype=master_dtype,
        process_group=process_group,
        layouts=layouts,
        shard_state=shard_state,
        bucket_cap_mb=bucket_cap_mb,
        gradients=gradients,
        **others,
    )
