"""Refusals: refuses settings of Megatron that this optimizer cannot follow."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor

from muonmesh.errors import explain_error
from muonmesh.integrations.refusals import Refusals, refuse_settings

_NESTEROV = "Remove it; muon={'nesterov': True} is the default"

_OPTIMIZER: Refusals = {
    # With "adam", Megatron's config has the learning rate and betas of AdamW's parameters.
    "optimizer": (("adam",), "Set optimizer='adam' (--optimizer adam); Muon's settings go into muon={...}"),
    "decoupled_weight_decay": ((True,), "Set decoupled_weight_decay=True"),
    # Megatron-LM's scripts accept this field only together with use_precision_aware_optimizer.
    "optimizer_cpu_offload": ((False,), "Remove both settings; write muon={'state_device': 'cpu'}"),
    "use_precision_aware_optimizer": ((False,), "Remove it; write muon={'state_dtype': torch.bfloat16}"),
    "overlap_param_gather_with_optimizer_step": ((False,), "Remove it; overlap_param_gather alone may stay"),
    "reuse_grad_buf_for_mxfp8_param_ag": ((False,), "Remove it: parameters must be bf16, fp16 or fp32"),
    "grad_norm_skip_threshold": ((0, math.inf), "Remove it; write skip_above=..."),
    "use_layer_wise_distributed_optimizer": ((False,), "Set use_distributed_optimizer=True, which shards the state"),
    "optimizer_cuda_graph": ((False,), "Remove it: a CUDA graph would repeat the decisions of one step in every step"),
    # Of Megatron's own Muon. The momentum has two defaults, that of OptimizerConfig and that of Megatron-LM's scripts.
    "muon_momentum": ((0.95, 0.9), "Write muon={'momentum': ...}"),
    "muon_split_qkv": ((True,), "Write overrides={'linear_qkv': {'algorithm': 'muon', 'matrices': 'whole'}}"),
    "muon_use_nesterov": ((False,), _NESTEROV),  # its name until 0.16
    "muon_nesterov": ((False,), _NESTEROV),
    "muon_scale_mode": (("spectral",), "Write muon={'scale_mode': ...}"),
    "muon_fp32_matmul_prec": (("medium",), "Write muon={'compute_dtype': ...}"),
    "muon_coefficient_type": (("quintic",), "Write muon={'ns_coefficients': ...}"),
    "muon_num_ns_steps": ((5,), "Write muon={'ns_steps': ...}"),
    # "blockwise" is the default until 0.19, and "duplicated" orthogonalizes whole matrices.
    "muon_tp_mode": (("blockwise", "duplicated"), "Remove it: each matrix is orthogonalized whole"),
    "muon_scalar_optimizer": (("adam",), "Remove it: AdamW steps what Muon does not step"),
    "muon_extra_scale_factor": ((1.0,), "Write muon={'extra_scale_factor': ...}"),
}
"""Fields of OptimizerConfig: the values that work, and what to write if it has another. No version has all of them."""

_DDP: Refusals = {
    "fp8_param_gather": ((False,), "Remove it: parameters must be bf16, fp16 or fp32"),
    "fp4_param_gather": ((False,), "Remove it: parameters must be bf16, fp16 or fp32"),
    "num_distributed_optimizer_instances": ((1,), "Set it to 1"),
    "megatron_fsdp_use_decoupled_grad": ((False,), "Remove it: gradients are read in grad"),
}
"""Fields of DistributedDataParallelConfig, as in ``_OPTIMIZER``."""

_FSDP: Refusals = {
    "tensor_model_parallel_size": ((1,), "Set it to 1: Megatron-FSDP does not say how gate and up alternate in shards"),
    "pipeline_model_parallel_size": ((1,), "Set it to 1"),
    "expert_tensor_parallel_size": ((1,), "Set it to 1"),
    "qk_clip": ((False,), "Remove it: it scales weights that Megatron-FSDP has sharded"),
}
"""Fields of TransformerConfig with Megatron-FSDP, as in ``_OPTIMIZER``."""

_MODEL: Refusals = {
    "gtp_weight_remat_size": ((1,), "Set gtp_weight_remat_size=1"),
    "expert_gtp_weight_remat_size": ((1,), "Leave out expert_tensor_parallel_num_weight_shards"),
    "moe_single_grouped_weight": ((False,), "Set moe_single_grouped_weight=False, for one weight for each expert"),
}
"""Fields of TransformerConfig, as in ``_OPTIMIZER``."""


def refuse_state(settings: Mapping[str, Any], *, qk_clip: bool) -> None:
    """Raise ValueError if Megatron's checkpoints, or its log of norms, do not support the storage of the state.

    Megatron's sharded state dict describes all state as parts of global tensors. The scales of int8 momentum belong to
    the blocks of a shard and are no part of a global tensor, so a checkpoint would lack them.
    """
    if settings.get("state_device") is not None and qk_clip and script_argument("log_params_norm"):
        fault, needed = f"{settings['state_device']!r} with qk_clip=True and --log-params-norm", "only two of the three"
        write = "Remove --log-params-norm: Megatron would read master weights in CPU memory with a kernel of the GPU"
        raise ValueError(explain_error("muon={'state_device': ...} of Megatron", fault, needed, write))
    if settings.get("state_dtype") == "int8":
        needed, write = "a floating-point dtype, which its checkpoints can hold", "Write 'state_dtype': torch.bfloat16"
        raise ValueError(explain_error("muon={'state_dtype': ...} of Megatron", "'int8'", needed, write))


def refuse(config: Any, chunks: Sequence[Any], dump: Any) -> None:
    """Raise ValueError if a setting of Megatron would have no effect, or a wrong effect, with this optimizer.

    Args:
        config: Megatron's OptimizerConfig.
        chunks: The model chunks of this stage.
        dump: The argument ``dump_param_to_param_group_map``.
    """
    from megatron.core.distributed import DistributedDataParallel

    refuse_settings("OptimizerConfig", partial(_field, config), _OPTIMIZER)
    if config.lr is None:
        write = "Set lr=... (--lr), the rate of AdamW's parameters and of all others without their own"
        raise ValueError(explain_error("OptimizerConfig", "lr=None", "a learning rate", write))
    arguments: Refusals = {"dump_param_to_param_group_map": ((), "Write print(optimizer.explain()) instead")}
    refuse_settings("get_megatron_optimizer", lambda _: dump, arguments)
    for chunk in chunks:
        fsdp = is_fsdp(chunk)
        if not fsdp and not isinstance(chunk, DistributedDataParallel):  # such as TorchFullyShardedDataParallel
            problem, write = f"a {type(chunk).__name__}", "Wrap each chunk in Megatron's DistributedDataParallel"
            raise ValueError(explain_error("model_chunks", problem, "a chunk with main_grad", write))
        flat = (config.use_distributed_optimizer,), "Set it as in OptimizerConfig"
        wrapper = (fsdp,), "Wrap the chunk in megatron.core.distributed.FullyShardedDataParallel, or remove it"
        ddp = {**_DDP, "use_distributed_optimizer": flat, "use_megatron_fsdp": wrapper}
        if fsdp:
            del ddp["num_distributed_optimizer_instances"]
        refuse_settings("DistributedDataParallelConfig", partial(_field, chunk.ddp_config), ddp)
        _refuse_unreduced_experts(chunk.config, chunk)
        model: Refusals = {**_MODEL, **(_FSDP if fsdp else {})}
        refuse_settings("TransformerConfig", partial(_field, chunk.config), model)
        if fsdp and not all(isinstance(parameter, DTensor) for parameter in chunk.parameters()):
            problem, needed = "whole parameters that a forward pass has gathered", "those that Megatron-FSDP shards"
            write = "Make the optimizer before the first forward pass"
            raise ValueError(explain_error("model_chunks", problem, needed, write))
        if fsdp:
            _refuse_summed_gradients(chunk)


def is_fsdp(chunk: Any) -> bool:
    """Return whether a chunk is wrapped in Megatron-FSDP: megatron.core.distributed.FullyShardedDataParallel."""
    return hasattr(getattr(chunk, "module", None), "install_optimized_model_weights")


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def script_argument(name: str) -> Any:
    """Return an argument of Megatron-LM's scripts; None outside of them, or if they have no such argument."""
    return getattr(getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None), name, None)


def refuse_formats(chunks: Sequence[Any], *, flat: bool) -> None:
    """Raise ValueError if the arguments of Megatron-LM's scripts choose a checkpoint format without support.

    Args:
        chunks: The model chunks of this stage.
        flat: Whether the data-parallel ranks have different parts of the state. The format "torch" saves only the part
            of the first rank.
    """
    if any(map(is_fsdp, chunks)):
        write = "Remove --save: the scripts' formats lack this state. Write muonmesh.checkpoint.save(...) in the loop"
        refuse_settings("Megatron-LM's arguments", script_argument, {"save": ((), write), "load": ((), write)})
        return
    accepted = ("torch_dist",) if flat else ("torch_dist", "torch")
    entry = accepted, "Write --ckpt-format torch_dist, and so for --ckpt-convert-format: saving would fail"
    refuse_settings("Megatron-LM's arguments", script_argument, {"ckpt_format": entry, "ckpt_convert_format": entry})


def _refuse_unreduced_experts(model: Any, chunk: Any) -> None:
    """Raise ValueError for experts whose gradients differ on ranks that hold the same experts.

    Without expert parallelism, megatron-core 0.16.1 marks experts with ``allreduce=True``, so their gradients are
    averaged over the data-parallel ranks of the dense weights. If the size of expert tensor parallelism differs, the
    tensor-parallel ranks hold copies that have seen different tokens. Nothing averages the gradients of these copies,
    so the copies drift apart with every optimizer. Later versions mark such experts with ``allreduce=False``.
    """
    if not getattr(model, "num_moe_experts", None) or model.expert_model_parallel_size > 1:
        return
    tensor, expert = model.tensor_model_parallel_size, model.expert_tensor_parallel_size
    experts = [parameter for name, parameter in chunk.named_parameters() if ".experts." in name]
    if expert not in (None, tensor) and any(getattr(parameter, "allreduce", True) for parameter in experts):
        problem = f"expert_tensor_parallel_size={expert} and expert_model_parallel_size=1 under "
        problem += f"tensor_model_parallel_size={tensor}: Megatron does not average the gradients of such experts"
        write = f"Set expert_model_parallel_size above 1, or expert_tensor_parallel_size={tensor}"
        raise ValueError(explain_error("TransformerConfig", problem, "sizes for which it averages them", write))


def _refuse_summed_gradients(chunk: Any) -> None:
    """Raise ValueError if Megatron-FSDP would sum gradients that it is set to average.

    Where the outer axis of a hybrid mesh shards the optimizer's state, gradients are reduced in a second buffer, which
    megatron-core 0.17 and later create without the scaling factor of the first. Gradients, and the norm that clip_grad
    is compared with, are then as many times too large as there are data-parallel ranks, with every optimizer.
    """
    for group in chunk.module.param_and_grad_buffer.parameter_groups:
        reduced, main = getattr(group, "hfsdp_helper_gbuf", None), group.main_grad_buffer
        if reduced is not None and reduced.gradient_scaling_factor != main.gradient_scaling_factor:
            problem = "outer_dp_sharding_strategy='optim', with which this version of Megatron-FSDP sums gradients"
            needed = "gradients that it averages"
            write = "Set outer_dp_sharding_strategy='no_shard': otherwise clip_grad compares a norm that is too large"
            raise ValueError(explain_error("DistributedDataParallelConfig", problem, needed, write))
