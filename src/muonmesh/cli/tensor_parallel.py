"""Tensor parallel: how the ranks of a group share each layer of a Llama-like model, Megatron's way.

Projections into a layer are cut by rows and those out of it by columns, as the model's own ``base_model_tp_plan`` says;
between them each rank computes its heads and its part of the MLP. Between layers the hidden states are cut along the
sequence (``SequenceParallel``), so norms and residuals are shared as well. Embedding and head are cut by vocabulary.
Outside its layers a model sees whole sequences: positions and masks are made as ever.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SEQUENCE_DIM = 1  # hidden states are (batch, sequence, width)
HEADS_DIM = 2  # what a norm of queries or keys sees is (batch, sequence, heads, head width)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share the layers of ``model`` among the ranks of a one-dimensional ``mesh``; every parameter becomes a DTensor.

    Raises:
        ValueError: this model cannot be shared so; :func:`check_tensor_parallel` says so without ranks.
    """
    embedding, head = _embedding(model), _head(model)
    tied = embedding.weight is head.weight
    # Each rank has built the whole model from the same seed: nothing needs to be sent.
    parallelize_module(model, mesh, _plan_of(model), src_data_rank=None)
    if tied:  # the head has been given a parameter of its own, cut like the embedding's
        head.weight = embedding.weight
    embedding.weight.register_post_accumulate_grad_hook(_keep_own_part)  # type: ignore[no-untyped-call]


def check_tensor_parallel(model: nn.Module, *, name: str, ranks: int, seq: int) -> None:
    """Whether ``ranks`` can share each layer of ``model``; needs no weights and no other rank.

    Raises:
        ValueError: the model has no plan or one of another kind; or its heads, its MLP or the sequence cannot be
            divided.
    """
    try:
        _plan_of(model)
    except ValueError as error:
        raise ValueError(
            f"--model {name}: {error}; tensor parallelism needs layers like Llama's, as in llama, mistral, qwen2, "
            "qwen3, gemma2. Write: --parallel fsdp"
        ) from error
    config: Any = model.config
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    most = math.gcd(heads, key_value_heads, config.intermediate_size)
    if most % ranks:
        raise ValueError(
            f"--model {name}: {ranks} ranks cannot share a layer of {heads} heads, {key_value_heads} key-value heads "
            f"and an MLP {config.intermediate_size} wide; needed a divisor of {most}. Choose another --ranks or "
            "--model, or write: --parallel fsdp"
        )
    if seq % ranks:
        raise ValueError(
            f"--seq {seq}: cannot be divided over the {ranks} ranks that share a layer. "
            f"Write: --seq {math.ceil(seq / ranks) * ranks}"
        )


def _plan_of(model: Any) -> dict[str, ParallelStyle]:
    """A style for every module that holds parameters, by name; a ValueError that tells why there is none."""
    source = getattr(model.config, "base_model_tp_plan", None)
    if not source:
        raise ValueError(f"transformers has no tensor-parallel plan for {model.config.model_type}")
    unknown = sorted({style for style in source.values() if style not in _STYLES})
    if unknown:
        raise ValueError(f"the plan that transformers has for it asks for {', '.join(unknown)}")
    base = f"{model.base_model_prefix}."
    layers = f"{base}layers.*"
    embedding, head = _embedding(model), _head(model)
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = next((style for path, style in source.items() if _matches(name, base + path)), None)
        holds_parameters = any(True for _ in module.parameters(recurse=False))
        if style is not None:
            plan[name] = _STYLES[style]()
        elif module is embedding:
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif module is head:
            plan[name] = ColwiseParallel(input_layouts=Shard(SEQUENCE_DIM), output_layouts=Replicate())
        elif name == f"{layers[:-1]}0":
            plan[name] = _HiddenStates(Replicate(), Shard(SEQUENCE_DIM), as_local=True)
        elif _matches(name, f"{layers}.self_attn") or _matches(name, f"{layers}.mlp"):
            plan[name] = _HiddenStates(Shard(SEQUENCE_DIM), Replicate(), as_local=False)
        elif holds_parameters and (_matches(name, f"{layers}.*") or name == f"{base}norm"):
            plan[name] = SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
        elif holds_parameters:
            raise ValueError(f"nothing says how to share {name}")
        elif isinstance(module, nn.Dropout) and module.p > 0 and not _matches(name, f"{layers}.*", prefix=True):
            # There every rank holds the whole sequence, and each would drop something else of it.
            raise ValueError(f"{name} drops out whole sequences, which the ranks would do differently")
    return plan


class _HiddenStates(ParallelStyle):
    """Redistributes the hidden states that a module is called with, by position or by name.

    ``as_local`` gives the module a plain tensor; otherwise it gets a DTensor, whose gradient its projections know to
    be partial.
    """

    def __init__(self, source: Placement, target: Placement, *, as_local: bool) -> None:
        self.source, self.target, self.as_local = source, target, as_local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if args:
                return (self._moved(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._moved(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _moved(self, hidden_states: Any, mesh: DeviceMesh) -> Any:
        whole = DTensor.from_local(hidden_states, mesh, [self.source], run_check=False)
        moved = whole.redistribute(placements=[self.target])
        return moved.to_local() if self.as_local else moved


def _keep_own_part(parameter: Tensor) -> None:
    """DTensor gives a rank that holds a part of an embedding the gradient of all of it; FSDP2 sees to that itself."""
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
    # Norms of queries and keys: each rank normalises its own heads with the same weight.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True),
}


def _matches(name: str, pattern: str, *, prefix: bool = False) -> bool:
    """Whether the parts of a dotted name match those of a pattern one by one; with ``prefix``, the first of them."""
    names, patterns = name.split("."), pattern.split(".")
    if len(names) != len(patterns) and not (prefix and len(names) > len(patterns)):
        return False
    return all(map(fnmatchcase, names, patterns))


def _embedding(model: Any) -> nn.Embedding:
    found: nn.Embedding = model.get_input_embeddings()
    return found


def _head(model: Any) -> nn.Linear:
    found: nn.Linear = model.get_output_embeddings()
    return found
