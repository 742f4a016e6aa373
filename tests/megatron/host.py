"""Megatron-Core as the tests use it: parallel state, tiny real models, its DistributedDataParallel, its schedules."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", module=r"megatron\.")
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing import load as _load  # noqa: E402, F401  # imported once, not by each rank
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.package_info import MAJOR, MINOR  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from tests.megatron import cpu, kernels  # noqa: E402

VOCABULARY, LENGTH = 64, 16
LATER = (MAJOR, MINOR) > (0, 16)
"""Whether this is a version after 0.16, which only Python 3.12 has."""


@contextlib.contextmanager
def writers() -> Iterator[None]:
    """Let this rank start Megatron's writers of checkpoints, and end the process that holds their answers.

    Megatron keeps that one for the life of a rank. Ranks of tests are killed, and it would outlive them.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        queue, filesystem_async._results_queue = filesystem_async._results_queue, None
        if queue is not None:
            queue._manager.shutdown()


@dataclass(frozen=True)
class Shape:
    """How a run is cut up, and what it trains.

    Attributes:
        tp, pp, ep, etp, vpp: Sizes of tensor, pipeline, expert and expert tensor parallelism, chunks of a stage.
        dtype: Of the parameters; gradients are fp32.
        flat: Whether Megatron's distributed optimizer holds the state.
        overlap: Whether gradients are reduced during the backward pass, in small buckets.
        late_gather: Whether parameters are gathered in the next forward pass, with the distributed optimizer.
        fsdp: What Megatron-FSDP shards (``data_parallel_sharding_strategy``); None: DistributedDataParallel is used.
        tied: Whether embedding and output layer are one parameter.
        frozen: An expression; parameters in whose names it is found are not trained.
        frozen_stage: Nor are those of this pipeline stage.
        vocabulary: Rows of embedding and output layer: Megatron pads them to a multiple that grows with `tp`.
        model: Settings of TransformerConfig.
        ddp: Settings of DistributedDataParallelConfig.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    dtype: torch.dtype = torch.float32
    flat: bool = False
    overlap: bool = False
    late_gather: bool = False
    fsdp: str | None = None
    tied: bool = False
    frozen: str = "^$"
    frozen_stage: int | None = None
    vocabulary: int = VOCABULARY
    model: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()

    def but(self, **changes: Any) -> Shape:
        return replace(self, **changes)


class Norm(nn.RMSNorm):
    """What a spec needs where sequence parallelism is on: Megatron's WrappedTorchNorm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(DotProductAttention):
    """Megatron's own, without the sizes of keys and values that its MLA passes and it does not take."""

    def __init__(self, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (None, self.config.kv_channels)


def begin(shape: Shape) -> None:
    """Make Megatron's groups for this shape; all ranks do. Without a device (gloo) what it asks a GPU is answered."""
    if dist.get_backend() == "gloo":
        cpu.install()
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    parallel_state.destroy_model_parallel()
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "expert_model_parallel_size": shape.ep,
    }
    if shape.etp is not None:
        sizes["expert_tensor_parallel_size"] = shape.etp
    if shape.vpp is not None:
        sizes["virtual_pipeline_model_parallel_size"] = shape.vpp
    if (instances := dict(shape.ddp).get("num_distributed_optimizer_instances")) is not None:
        sizes["num_distributed_optimizer_instances"] = instances
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def config_of(shape: Shape) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "batch_p2p_sync": False,
        "params_dtype": shape.dtype,
        "pipeline_dtype": shape.dtype,
        "bf16": shape.dtype == torch.bfloat16,
        "fp16": shape.dtype == torch.float16,
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "expert_model_parallel_size": shape.ep,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": shape.vpp,
        **dict(shape.model),
    }
    kind = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
    return kind(**settings)


def spec_of(config: TransformerConfig) -> Any:
    """The local layers' spec; with sequence parallelism or MLA the classes above in it."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=isinstance(config, MLATransformerConfig),
        normalization="RMSNorm",
    )
    if config.experimental_attention_variant == "gated_delta_net":
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    if isinstance(config, MLATransformerConfig):
        spec.submodules.self_attention.submodules.core_attention = LatentAttention
    if not config.sequence_parallel:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


def mtp_of(config: TransformerConfig, spec: Any, stage: dict[str, int]) -> Any:
    """The spec of multi-token prediction on the stage that has it."""
    if config.mtp_num_layers is None:
        return None
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **stage)


def gpt(config: TransformerConfig, shape: Shape, stage: dict[str, int]) -> nn.Module:
    spec = spec_of(config)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp_of(config, spec, stage),
        vocab_size=shape.vocabulary,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        **stage,
    )


def mamba(config: TransformerConfig) -> nn.Module:
    """One Mamba layer and an MLP, of local layers. Its package of specs asks for Transformer Engine."""
    kernels.install()
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    parts = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=ModuleSpec(module=MLP, submodules=linear),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
    stack = ModuleSpec(module=MambaStack, submodules=parts, params={"post_layer_norm": False})
    return MambaModel(config, stack, VOCABULARY, LENGTH, hybrid_override_pattern="M-")


def chunks_of(shape: Shape, *, seed: int = 7) -> list[DistributedDataParallel]:
    """The chunks of this rank's stage, in Megatron's own wrappers; `begin` comes first."""
    config = config_of(shape)
    chunks = []
    for chunk in range(shape.vpp or 1):
        torch.manual_seed(seed)
        stage = {} if shape.vpp is None else {"vp_stage": chunk}
        model: nn.Module = mamba(config) if "mamba_state_dim" in dict(shape.model) else gpt(config, shape, stage)
        for name, parameter in model.named_parameters():
            trained = shape.frozen_stage != parallel_state.get_pipeline_model_parallel_rank()
            parameter.requires_grad_(trained and re.search(shape.frozen, name) is None)
        model.cuda()
        if shape.dtype != torch.float32:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": True,
                "overlap_grad_reduce": shape.overlap,
                "use_distributed_optimizer": shape.flat,
                "overlap_param_gather": shape.late_gather,
                "bucket_size": 2000 if shape.overlap else None,
                **dict(shape.ddp),
            }
        )
        if shape.fsdp is not None:
            chunks.append(sharded(config, ddp, model, shape.fsdp))
            continue
        wrapped = DistributedDataParallel(config, ddp, model)
        wrapped.broadcast_params()
        chunks.append(wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    if shape.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = config.no_sync_func[0] if len(chunks) == 1 else config.no_sync_func
    return chunks


def sharded(config: TransformerConfig, ddp: DistributedDataParallelConfig, model: nn.Module, strategy: str) -> Any:
    """A model in Megatron-FSDP. What is scaled in the reduction itself, NCCL alone can do."""
    ddp.use_megatron_fsdp, ddp.gradient_reduce_div_fusion = True, False
    ddp.data_parallel_sharding_strategy, ddp.use_distributed_optimizer = strategy, True
    ddp.overlap_grad_reduce = ddp.overlap_param_gather = strategy == "optim_grads_params"
    wrapped = FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))
    if ddp.overlap_grad_reduce:  # as Megatron-LM's scripts: otherwise gradients would be reduced twice
        config.no_sync_func = wrapped.no_sync
    return wrapped


def average_in_hybrid(chunks: Sequence[Any]) -> None:
    """Have Megatron-FSDP average gradients where the outer axis shards the state, too: from 0.17 on it sums them."""
    for chunk in chunks:
        for group in chunk.module.param_and_grad_buffer.parameter_groups:
            if getattr(group, "hfsdp_helper_gbuf", None) is not None:
                group.hfsdp_helper_gbuf.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Other tokens for each data-parallel rank and each turn: ids, positions, mask."""
    generator = torch.Generator().manual_seed(seed * 100 + parallel_state.get_data_parallel_rank())
    while True:
        ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).cuda()
        positions = torch.arange(LENGTH, device=ids.device).expand(2, LENGTH).contiguous()
        yield ids, positions, torch.ones(LENGTH, LENGTH, device=ids.device).triu(1).bool()[None, None]


def _forward(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    ids, positions, mask = next(data)
    return model(ids, positions, mask, labels=ids), lambda losses: (losses.float().mean(), {"loss": losses.detach()})


def backward(shape: Shape, chunks: Sequence[DistributedDataParallel], optimizer: Any, step: int) -> list[float]:
    """One forward and backward pass of the whole pipeline with Megatron's schedule, and its reduction of gradients."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    chunks[0].config.grad_scale_func = optimizer.scale_loss if optimizer is not None else None
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[batches(step) for _ in chunks] if len(chunks) > 1 else batches(step),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=shape.pp if shape.vpp else 2,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return [float(loss["loss"].float().mean()) for loss in losses]


def optimizer_config(shape: Shape, **settings: Any) -> OptimizerConfig:
    return OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 0.02,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "initial_loss_scale": 2.0**10,
            "bf16": shape.dtype == torch.bfloat16,
            "fp16": shape.dtype == torch.float16,
            "params_dtype": shape.dtype,
            "use_distributed_optimizer": shape.flat or shape.fsdp is not None,
            "overlap_param_gather": shape.late_gather,
            **settings,
        }
    )
