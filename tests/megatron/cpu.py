"""Megatron-Core on a CPU: its questions about the device, answered "cpu". Nothing that it computes is replaced.

It asks which device is current, makes tensors with ``device="cuda"``, calls ``.cuda()`` and compares the names of
tensor types. `install` answers these in the process that calls it, each in a function of its own with the place in
megatron-core 0.16.1 that asks. Version 0.19.2 asks the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_gather, broadcast, reduce, reduce_scatter
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """``device="cuda"`` in a factory or in ``.to``, and ``.cuda()``, mean the CPU; types have the names of CUDA's.

    optimizer/optimizer.py and optimizer/distrib_optimizer.py tell dtypes by ``param.type() == "torch.cuda.…"``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.device and args and str(args[0]).startswith("cuda"):
            args = ("cpu",)  # distributed/fsdp writes f"cuda:{torch.cuda.current_device()}"
        if func in (Tensor.cuda, Tensor.record_stream):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class NoStream:
    """A stream of a device that has none: all work is done when its call returns.

    transformer/moe/shared_experts.py and token_dispatcher.py make streams and wait for them.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_stream(self, _: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self) -> NoStream:
        return self


def current_device() -> torch.device:
    """distributed/param_and_grad_buffer.py allocates its buffers on ``torch.cuda.current_device()``."""
    return torch.device("cpu")


def synchronize(*_: Any) -> None:
    """pipeline_parallel/p2p_communication.py waits for the device after it has received."""


_mesh_of_groups = DeviceMesh.from_group


def mesh_of_groups(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    """distributed/fsdp/mcore_fsdp_adapter.py makes meshes of devices "cuda"."""
    return _mesh_of_groups(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


_mode: OnCpu | None = None


def install() -> None:
    """Answer in this process from now on; a second call changes nothing."""
    global _mode
    if _mode is not None:
        return
    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.synchronize = synchronize
    torch.cuda.Stream = NoStream  # type: ignore[assignment,misc]
    stream = NoStream()
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.Event = NoStream  # type: ignore[assignment,misc]
    # distributed/fsdp frees memory, and makes meshes of the groups that there are.
    torch.cuda.empty_cache = synchronize
    DeviceMesh.from_group = staticmethod(mesh_of_groups)  # type: ignore[method-assign,assignment]

    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # isinstance(module, TELinear), which is None without Transformer Engine.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = mcore_fsdp_adapter.TELinear = type("NoTELinear", (), {})
    # The router asks whether there is Transformer Engine's; 0.16.1 forgets the name where there is none.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Gated delta net refuses to be made without kernels that its deterministic mode does not use; this one it uses.
    asks = getattr(gated_delta_net, "common", gated_delta_net)  # a package after 0.16
    asks.HAVE_FLA, asks.l2norm = True, l2norm
    dist.all_gather, dist.reduce_scatter = gather_unequal, reduce_unequal
    PersistentAsyncCaller.async_loop = write_checkpoints
    # It leaves tensors that are on the CPU as they are, and gloo wants sizes as numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers
    _mode = OnCpu()
    _mode.__enter__()


def gather_unequal(parts: list[Tensor], sent: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Parts of unequal sizes, which NCCL gathers and gloo refuses.

    transformer/moe/token_dispatcher.py gathers the tokens of expert-tensor-parallel ranks, and
    optimizer/layer_wise_optimizer.py the parameters that each rank has stepped.
    """
    if len({part.shape for part in parts}) == 1:
        return all_gather(parts, sent, group=group, async_op=async_op)
    parts[dist.get_rank(group)].copy_(sent)
    for rank, part in enumerate(parts):
        broadcast(part, group=group, group_src=rank)
    return None


def reduce_unequal(
    received: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any
) -> None:
    """Parts of unequal sizes, as above, on the way back."""
    if len({part.shape for part in parts}) == 1:
        reduce_scatter(received, parts, op=op, group=group)
        return
    for rank, part in enumerate(parts):
        reduce(part, op=op, group=group, group_dst=rank)
    received.copy_(parts[dist.get_rank(group)])


def write_checkpoints(*args: Any) -> None:
    """What the process that writes checkpoints runs: dist_checkpointing/strategies/async_utils.py sets a device there.

    The process is spawned, so that this module is imported anew and Megatron's function is its own.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = torch.cuda.synchronize = synchronize
    PersistentAsyncCaller.async_loop(*args)


def once(gate: Path, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Write a checkpoint when there is such a file."""
    while not gate.exists():
        time.sleep(0.01)
    write(*args, **kwargs)


def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What transformer/moe/moe_utils.py's function of another name returns for a tensor on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """What ssm/gated_delta_net.py takes from a package of kernels: vectors of length one."""
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)
