"""Model: a causal language model from `transformers`, built from a configuration and never downloaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonmesh.cli.settings import REPLICAS, Dtype, Parallel, tensor_parallel_ranks
from muonmesh.cli.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from muonmesh.cli.tokenizer import END_OF_TEXT_ID

# Llama architectures: gated MLPs of 8/3 the width; heads of 64, or smaller ones where there would be fewer than four,
# so that four ranks can share a layer. They do not depend on --ranks: a run resumes on any number of ranks.
PRESETS: dict[str, dict[str, int]] = {
    "nano": {"hidden_size": 64, "num_hidden_layers": 2},
    "small": {"hidden_size": 128, "num_hidden_layers": 4},
    "medium": {"hidden_size": 512, "num_hidden_layers": 8},
    "large": {"hidden_size": 768, "num_hidden_layers": 12},
    "xl": {"hidden_size": 2048, "num_hidden_layers": 16},
}
HEAD_SIZE = 64
LEAST_HEADS = 4


def model_config(model: str, *, vocab: int, seq: int) -> Any:
    """The `transformers` configuration that ``--model`` names: a preset, a JSON file, or a model type.

    The vocabulary is the tokenizer's, whatever the configuration says.

    Raises:
        ValueError: the name is none of the three, or the model cannot read ``seq`` tokens.
    """
    from transformers import AutoConfig

    if model in PRESETS:
        fields: dict[str, Any] = {"model_type": "llama", **_llama(**PRESETS[model]), "max_position_embeddings": seq}
    elif model.endswith(".json") or Path(model).is_file():
        fields = _read_json(Path(model))
    else:
        fields = {"model_type": model}
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--model {model}: {_first_sentence(error)}. Needed a preset ({', '.join(PRESETS)}), the path of a "
            "transformers config.json, or a model type such as gpt2."
        ) from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < seq:
        raise ValueError(f"--model {model}: reads at most {longest} tokens; --seq is {seq}. Write: --seq {longest}")
    text.vocab_size = vocab
    text.bos_token_id = text.eos_token_id = END_OF_TEXT_ID  # those of another vocabulary may lie outside this one
    text.pad_token_id = None  # nothing is padded, and a padding row of the embedding would never learn
    return config


def build_model(config: Any) -> nn.Module:
    """A freshly initialised model on the current default device and random state.

    Raises:
        ValueError: the configuration is not of a causal language model.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(
            f"--model: {config.model_type} does not predict the next token ({_first_sentence(error)}); needed a causal "
            "language model, such as llama or gpt2."
        ) from error
    return model


def check_model(model: str, *, vocab: int, seq: int, tensor_parallel: int = 1) -> int:
    """Build the model without memory and return its number of parameters; raises what a rank would raise.

    Raises:
        ValueError: there is no such model, or ``tensor_parallel`` ranks cannot share its layers.
    """
    with torch.device("meta"):
        built = build_model(model_config(model, vocab=vocab, seq=seq))
    if tensor_parallel > 1:
        check_tensor_parallel(built, name=model, ranks=tensor_parallel, seq=seq)
    return sum(p.numel() for p in built.parameters())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded one by one, in the order they are defined."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        return blocks
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=lambda stack: sum(p.numel() for b in stack for p in b.parameters()), default=[])


def parallelise(model: nn.Module, *, parallel: Parallel, dtype: Dtype, device: torch.device) -> nn.Module:
    """Spread the model over all ranks; weights stay fp32.

    ``ddp`` replicates. ``fsdp`` shards each layer, then the root, with FSDP2; ``hsdp`` shards within each of two
    replicas. ``tp`` shares the work in each layer; ``fsdp+tp`` shares it in pairs of ranks and shards over the pairs.
    With bf16, FSDP2 casts the weights it gathers and reduces gradients in fp32; ``ddp`` and ``tp`` run under autocast.

    Raises:
        ValueError: the ranks cannot share the layers of this model; :func:`check_model` says so without ranks.
    """
    model = model.to(device)
    if parallel == "ddp":
        return DistributedDataParallel(model)
    ranks = torch.distributed.get_world_size()
    shared = tensor_parallel_ranks(parallel, ranks)
    if parallel == "hsdp":
        mesh = init_device_mesh(device.type, (REPLICAS, ranks // REPLICAS), mesh_dim_names=("replicate", "shard"))
    elif shared == 1:
        mesh = init_device_mesh(device.type, (ranks,))
    else:
        both = init_device_mesh(device.type, (ranks // shared, shared), mesh_dim_names=("shard", "tensor"))
        both._flatten("all")  # so that the norm for clipping is one reduction and the same number on all ranks
        apply_tensor_parallel(model, both["tensor"])
        # The logits are a view of what was gathered from their parts. The loss only reads them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = both["shard"]
    if parallel == "tp":
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == "bf16" else None, reduce_dtype=torch.float32)
    for block in reversed(blocks_of(model)):  # inner before outer, should one hold another
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _llama(*, hidden_size: int, num_hidden_layers: int) -> dict[str, int]:
    heads = max(LEAST_HEADS, hidden_size // HEAD_SIZE)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": round(hidden_size * 8 / 3 / HEAD_SIZE) * HEAD_SIZE,
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--model {path}: no such file; needed a transformers config.json.")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path}: not JSON ({error}).") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f'--model {path}: found no "model_type"; needed a transformers config.json.')
    return fields


def _first_sentence(error: Exception) -> str:
    """Transformers goes on to list every model it knows."""
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
