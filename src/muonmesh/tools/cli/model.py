"""Model: the `transformers` configuration that ``--model`` names, and a causal language model built from it.

Nothing is downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonmesh.errors import FileError
from muonmesh.files import read_json
from muonmesh.tools.cli.corpus import END_OF_TEXT_ID
from muonmesh.tools.cli.run_settings import REPLICAS, Dtype, Parallel, Settings


def _llama(width: int, layers: int, heads: int, key_value_heads: int, middle: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": middle}
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "num_key_value_heads": key_value_heads}


# Widths and layers of Llama architectures. The gated MLP has 8/3 of the width. Heads have size 64, or less if there
# would be fewer than four heads.
PRESETS = {"nano": (64, 2), "small": (128, 4), "medium": (512, 8), "large": (768, 12), "xl": (2048, 16)}
HEAD_SIZE = 64
LEAST_HEADS = 4
LLAMA_8B = {"vocab_size": 128256, **_llama(4096, 32, 32, 8, 14336)}
LLAMA_70B = {"vocab_size": 128256, **_llama(8192, 80, 64, 8, 28672)}
KNOWN: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA_8B,
    "llama-3-70b": LLAMA_70B,
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-70b": LLAMA_70B,
    "llama-3.1-405b": {"vocab_size": 128256, **_llama(16384, 126, 128, 8, 53248)},
    "llama-3.2-1b": {"vocab_size": 128256, "tie_word_embeddings": True, **_llama(2048, 16, 32, 8, 8192)},
    "deepseek-v3": {"model_type": "deepseek_v3"},  # its sizes are the defaults of transformers
}
MOST_LAYERS = 10_000  # transformers creates an object for each layer before sizes can be checked


def model_config(model: str, *, vocab: int, seq: int) -> Any:
    """Return the `transformers` configuration that ``--model`` names, with the run's vocabulary and sequence length.

    Args:
        model: The value of ``--model``.
        vocab: The vocabulary size of the tokenizer, which replaces the configuration's.
        seq: Tokens per sequence.

    Raises:
        ValueError: as `configuration`, or the model cannot read ``seq`` tokens.
    """
    config = configuration(model, vocab=vocab, seq=seq)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < seq:
        raise FileError(f"--model {model}: reads at most {longest} tokens; --seq is {seq}. Write: --seq {longest}")
    text.vocab_size = vocab
    text.bos_token_id = text.eos_token_id = END_OF_TEXT_ID  # the configuration's may be outside this vocabulary
    text.pad_token_id = None  # nothing is padded, and a padding row of the embedding would never learn
    return config


def configuration(model: str, *, vocab: int, seq: int) -> Any:
    """Return the `transformers` configuration that ``--model`` names, unchanged.

    Args:
        model: The value of ``--model``.
        vocab: The vocabulary size of a preset.
        seq: The number of positions of a preset.

    Raises:
        ValueError: the file is missing or no configuration, the model type is unknown, or a field has an impossible
            value.
    """
    from transformers import AutoConfig

    fields = _fields(model, vocab=vocab, seq=seq)
    kind = fields.pop("model_type")
    try:
        config: Any = AutoConfig.for_model(kind, **fields)
    except OSError:  # from an import
        raise
    except Exception as error:  # about four hundred classes, each with its own errors
        raise FileError(
            f"--model {model}: {sentence(error)}. Needed a preset ({', '.join(PRESETS)}), a known "
            f"model ({', '.join(KNOWN)}), the path of a "
            "transformers config.json, or a model type such as gpt2."
        ) from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise FileError(f"--model {model}: found num_hidden_layers {layers}; needed 1 to {MOST_LAYERS}")
    return config


def _fields(model: str, *, vocab: int, seq: int) -> dict[str, Any]:
    """Return the fields of a configuration: of a known model, a preset, a JSON file, a folder with one, or a type.

    Raises:
        FileError: the file is missing, or has no "model_type".
    """
    if model in KNOWN:
        return dict(KNOWN[model])
    if model in PRESETS:
        width, layers = PRESETS[model]
        heads = max(LEAST_HEADS, width // HEAD_SIZE)
        middle = round(width * 8 / 3 / HEAD_SIZE) * HEAD_SIZE
        return {"vocab_size": vocab, "max_position_embeddings": seq, **_llama(width, layers, heads, heads, middle)}
    path = Path(model)
    if not (path.exists() or model.endswith(".json")):
        return {"model_type": model}
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = read_json(path, needed="a transformers config.json")
    except FileError as error:
        raise FileError(f"--model {error}") from error
    if not isinstance(fields.get("model_type"), str):
        raise FileError(f'--model {path}: found no "model_type"; needed a transformers config.json.')
    return fields


def sentence(error: Exception) -> str:
    """Return the first sentence of an error; after it, transformers lists every known model."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "Validation error for field ...:", then the error itself
        lines = [re.sub(r"^\w+(Error|Exception): ", "", lines[1])]
    first = lines[0].split(". ")[0].rstrip(".") if lines else ""
    return first if isinstance(error, ValueError | TypeError) and first else f"{type(error).__name__}: {first}"


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
    block_ids = {id(parameter) for parameter in block.parameters()}
    inside = sum(1 for _, p in block.named_parameters(remove_duplicate=False))
    everywhere = sum(id(p) in block_ids for _, p in model.named_parameters(remove_duplicate=False))
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
