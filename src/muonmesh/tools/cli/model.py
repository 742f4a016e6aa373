"""Model: a causal language model from `transformers`, built from a configuration and never downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonmesh.errors import FileError
from muonmesh.tools.cli.configuration import configuration, model_config, sentence
from muonmesh.tools.cli.run_settings import REPLICAS, Dtype, Parallel, Settings

SHARDING = ("fsdp", "hsdp")
DDP = "Write: --parallel ddp"


def build_model(config: Any) -> nn.Module:
    """Return a newly initialized model, on the current default device, from the current random state.

    Raises:
        ValueError: the configuration belongs to no causal language model, or has impossible values.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # about two hundred models, each with its own errors
        if str(error).startswith("Unrecognized configuration class"):
            raise FileError(
                f"--model: {config.model_type} does not predict the next token ({sentence(error)}); needed a causal "
                "language model, such as llama or gpt2."
            ) from error
        raise FileError(
            f"--model: {config.model_type} cannot be built from this configuration: {sentence(error)}. Correct it, or "
            "choose another --model"
        ) from error
    return model


def meta_model(model: str, *, vocab: int, seq: int) -> nn.Module:
    """Return the model of a preset, a folder or file, or a model type, on the meta device.

    Args:
        model: The value of ``--model``, as for ``muonmesh train``.
        vocab, seq: The vocabulary size and the sequence length, for presets of ``muonmesh train``.

    Raises:
        ValueError: there is no such model, or it is no causal language model.
    """
    with torch.device("meta"):
        return build_model(configuration(model, vocab=vocab, seq=seq))


def check_model(settings: Settings) -> nn.Module:
    """Build the model of a run on the meta device, without memory, and return it. It raises the errors of a rank.

    Raises:
        ValueError: there is no such model, or its parameters cannot be sharded.
    """
    with torch.device("meta"):
        built = build_model(model_config(settings.model, vocab=settings.vocab, seq=settings.seq))
    check_parameters(built, name=settings.model, parallel=settings.parallel)
    return built


def check_parameters(model: nn.Module, *, name: str, parallel: Parallel) -> None:
    """Check that no parameter is empty, and that FSDP2 can shard each, if the run shards parameters.

    Raises:
        FileError: a parameter is empty or cannot be sharded; the message names the first.
    """
    for path, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise FileError(f"--model {name}: {path} is empty, of shape {tuple(parameter.shape)}; needed sizes above 0")
        if parameter.ndim == 0 and parallel in SHARDING:
            raise FileError(f"--model {name}: {path} is a single number, which FSDP2 cannot shard. {DDP}")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that FSDP2 shards one by one, in the order of their definition.

    A layer that shares a parameter with a module outside is left out, such as bert's embeddings, which share a
    parameter with its head. Such a parameter is sharded with the whole model.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    blocks = [module for module in named if not _shares(model, module)]
    if blocks:
        return blocks
    stacks = [list(module.children()) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=lambda stack: sum(p.numel() for b in stack for p in b.parameters()), default=[])


def _shares(model: nn.Module, block: nn.Module) -> bool:
    """Return whether a parameter of ``block`` also has a name outside of ``block``."""
    own = {id(parameter) for parameter in block.parameters()}
    inside = sum(1 for _, p in block.named_parameters(remove_duplicate=False))
    everywhere = sum(id(p) in own for _, p in model.named_parameters(remove_duplicate=False))
    return everywhere > inside


def parallelise(model: nn.Module, *, parallel: Parallel, dtype: Dtype, device: torch.device) -> nn.Module:
    """Return the model distributed over all ranks. Weights stay fp32.

    ``ddp`` replicates the model. ``fsdp`` shards each layer, then the root, with FSDP2. ``hsdp`` shards within each of
    two replicas. With bf16, FSDP2 casts gathered weights to bf16 and reduces gradients in fp32; ``ddp`` uses autocast.

    Raises:
        FileError: FSDP2 cannot shard this model.
    """
    model = model.to(device)
    if parallel == "ddp":
        return DistributedDataParallel(model)
    ranks = torch.distributed.get_world_size()
    if parallel == "hsdp":
        mesh = init_device_mesh(device.type, (REPLICAS, ranks // REPLICAS), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == "bf16" else None, reduce_dtype=torch.float32)
    try:
        for block in reversed(blocks_of(model)):  # inner blocks before the blocks that contain them
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    except ValueError as error:
        raise FileError(f"--parallel {parallel}: FSDP2 cannot shard this model: {sentence(error)}. {DDP}") from error
    return model
