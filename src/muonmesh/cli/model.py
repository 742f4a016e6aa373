"""Model: a causal language model from `transformers`, built from a configuration and never downloaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonmesh.cli.configuration import PRESETS, model_config, sentence
from muonmesh.cli.settings import REPLICAS, Dtype, Parallel, Settings, tensor_parallel_ranks
from muonmesh.cli.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from muonmesh.errors import FileError

# What only tensors without memory cannot do; grouped products of experts check their dtype.
NOT_FOLLOWED = re.compile(r"BF16|[Mm]eta tensor|[Ff]ake ?[Tt]ensor")
SHARDING = ("fsdp", "hsdp", "fsdp+tp")
DDP = "Write: --parallel ddp"
TRIED_TOKENS = 8  # in the forward pass that is tried without memory


def build_model(config: Any) -> nn.Module:
    """A freshly initialised model on the current default device and random state.

    Raises:
        ValueError: the configuration is not of a causal language model, or not of a possible one.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # each of some two hundred models in its own way
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


def load_model(folder: str, config: Any) -> nn.Module:
    """The model of a local folder with its weights, in fp32; nothing in the folder is executed.

    Raises:
        FileError: there are no weights in safetensors, or they are not those of the configuration.
    """
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of hubs, files and two hundred models
        raise FileError(
            f"--init {folder}: its weights cannot be read: {sentence(error)}. Needed a folder that `save_pretrained` "
            "wrote, with model.safetensors"
        ) from error
    for what, found in (("no weight", loaded["missing_keys"]), ("another shape of", loaded["mismatched_keys"])):
        if found:
            first = sorted(map(str, found))[0]
            raise FileError(f"--init {folder}: found {what} {first}; needed every weight of its config.json")
    trained: nn.Module = model.train()
    return trained


def check_model(
    model: str,
    *,
    vocab: int,
    seq: int,
    tensor_parallel: int = 1,
    parallel: Parallel = "ddp",
    init: str | None = None,
    recompute: bool = False,
) -> int:
    """Build the model without memory and return its number of parameters; raises what a rank would raise.

    Raises:
        ValueError: there is no such model, it cannot compute, its parameters cannot be sharded, or ``tensor_parallel``
            ranks cannot share its layers.
    """
    with torch.device("meta"):
        config = model_config(model, vocab=vocab, seq=seq, init=init is not None)
        built = build_model(config)
    if init is not None and not any(Path(init).glob("*.safetensors")):
        raise FileError(f"--init {init}: found no weights in safetensors; needed what `save_pretrained` writes")
    check_parameters(built, name=model, parallel=parallel)
    if recompute and not getattr(built, "supports_gradient_checkpointing", False):
        raise FileError(
            f"--checkpoint-activations: {type(built).__name__} of transformers cannot compute its layers again; needed "
            "a model that supports gradient checkpointing. Leave it out"
        )
    if tensor_parallel > 1:
        check_tensor_parallel(built, name=model, ranks=tensor_parallel, seq=seq)
    if model not in PRESETS:
        _try_forward(built, model, tokens=min(seq, TRIED_TOKENS), vocab=config.get_text_config().vocab_size)
    return sum(p.numel() for p in built.parameters())


def check_parameters(model: nn.Module, *, name: str, parallel: Parallel) -> None:
    """Make sure that each parameter holds something, and that it can be sharded where that is asked for.

    Raises:
        FileError: naming the first that does not or cannot.
    """
    for path, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise FileError(f"--model {name}: {path} is empty, of shape {tuple(parameter.shape)}; needed sizes above 0")
        if parameter.ndim == 0 and parallel in SHARDING:
            raise FileError(f"--model {name}: {path} is a single number, which FSDP2 cannot shard. {DDP}")


def _try_forward(model: nn.Module, name: str, *, tokens: int, vocab: int) -> None:
    """Send a sequence through a model without memory: heads that do not divide show only there.

    What depends on values, as routing to experts may, cannot be followed so far and is left to the ranks.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it has to say is said below
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = model.to_empty(device="cpu")  # of shapes alone, as on the meta device, which cannot compute as much
            logits = fake(input_ids=torch.zeros(1, tokens, dtype=torch.int64, device="cpu"), use_cache=False).logits
    except Exception as error:  # whatever two hundred models may raise
        if type(error).__module__.startswith("torch._subclasses") or NOT_FOLLOWED.search(str(error)):
            return
        if isinstance(error, NotImplementedError):
            return
        raise FileError(
            f"--model {name}: cannot compute with this configuration: {sentence(error)}. Correct it, or choose another "
            "--model"
        ) from error
    finally:
        log.setLevel(level)
    if tuple(logits.shape) != (1, tokens, vocab):
        raise FileError(
            f"--model {name}: gives {tuple(logits.shape)} for {tokens} tokens; needed one number for each of {vocab} "
            "entries of the vocabulary a token. Choose another --model"
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded one by one, in the order they are defined.

    Without those that share a parameter with something outside, as bert's embeddings do with its head: that belongs to
    the whole model.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    blocks = [module for module in named if not _shares(model, module)]
    if blocks:
        return blocks
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=lambda stack: sum(p.numel() for b in stack for p in b.parameters()), default=[])


def _shares(model: nn.Module, block: nn.Module) -> bool:
    """Whether a parameter of ``block`` has a name outside of it too."""
    own = {id(parameter) for parameter in block.parameters()}
    inside = sum(1 for _, p in block.named_parameters(remove_duplicate=False))
    everywhere = sum(id(p) in own for _, p in model.named_parameters(remove_duplicate=False))
    return everywhere > inside


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
    try:
        for block in reversed(blocks_of(model)):  # inner before outer, should one hold another
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    except ValueError as error:
        raise FileError(f"--parallel {parallel}: FSDP2 cannot shard this model: {sentence(error)}. {DDP}") from error
    return model


def prepare_layers(model: nn.Module, settings: Settings) -> None:
    """Change layers in place; their parameters keep their names. `check_model` has said whether they can be."""
    if settings.checkpoint_activations:
        recompute: Any = model
        recompute.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.compile:
        logging.getLogger("torch._inductor").setLevel(logging.ERROR)
        for block in blocks_of(model):
            block.compile()


WEIGHT = 4  # bytes: weights, gradients and state are fp32
HELD = 3  # weights, gradients and momentum; AdamW's second moment comes on top
PROCESS = 150 * 10**6  # bytes: Python and torch in each rank, at the very least
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def least_memory(parameters: int, settings: Settings) -> int:
    """Bytes of host memory that the ranks need together, at the least: activations are not counted.

    Each rank builds the whole model before it keeps its part. On GPUs what it keeps is elsewhere.
    """
    copies = settings.ranks
    if settings.device == "cpu":
        copies = max(copies, HELD * (settings.ranks if settings.parallel == "ddp" else 1))
    return copies * WEIGHT * parameters + settings.ranks * PROCESS


def check_memory(parameters: int, settings: Settings, memory: int | None = None) -> None:
    """Make sure that the machine has the memory, its host's or ``memory`` bytes.

    Raises:
        FileError: it has less than the least; the message says how much.
    """
    available = host_memory() if memory is None else memory
    needed = least_memory(parameters, settings)
    if available is not None and needed > available:
        raise FileError(
            f"--model {settings.model}: {parameters / 1e6:,.1f}M parameters on {settings.ranks} ranks need at least "
            f"{needed / 1e9:,.1f} GB; found {available / 1e9:,.1f} GB of memory. "
            "Choose a smaller --model or fewer --ranks"
        )


def host_memory() -> int | None:
    """Bytes of memory that this machine or this container has; None where nobody says."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in LIMITS:
        with contextlib.suppress(ValueError, OSError):
            found.append(int(Path(limit).read_text()))
    return min((size for size in found if size > 0), default=None)
