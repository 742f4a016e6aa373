"""Settings of TransformerConfig for the kinds of models that the tests train."""

from __future__ import annotations

from typing import Any

Settings = tuple[tuple[str, Any], ...]

MOE: Settings = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_grouped_gemm", False),
    ("moe_ffn_hidden_size", 24),
    ("moe_token_dispatcher_type", "alltoall"),
    ("moe_shared_expert_intermediate_size", 16),
)
LATENT: Settings = (
    ("num_query_groups", 4),
    ("q_lora_rank", 16),
    ("kv_lora_rank", 8),
    ("qk_head_dim", 8),
    ("qk_pos_emb_head_dim", 4),
    ("v_head_dim", 8),
    ("rope_type", "rope"),
    ("apply_rope_fusion", False),
)
SEQUENCE: Settings = (("sequence_parallel", True),)
ONE_LAYER: Settings = (("num_layers", 1),)
GATED_ATTENTION: Settings = (("attention_output_gate", True),)
NOT_GATED: Settings = (("gated_linear_unit", False), ("add_bias_linear", True))
DELTA_NET: Settings = (
    ("experimental_attention_variant", "gated_delta_net"),
    ("linear_attention_freq", [1]),
    ("linear_key_head_dim", 8),
    ("linear_value_head_dim", 8),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("linear_conv_kernel_dim", 2),
    ("deterministic_mode", True),
)
MAMBA: Settings = (("mamba_state_dim", 4), ("mamba_head_dim", 8), ("mamba_num_groups", 2))
MTP: Settings = (("mtp_num_layers", 1),)
