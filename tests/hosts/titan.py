"""torchtitan 0.3 on a CPU: its trainer with its debug Llama made tiny, on tokens that nobody has to download.

What is not torchtitan's: `Device` in place of CUDA, of which it asks names and memory; `causal` in place of flex
attention, which has no backward on a CPU; `summed`, since gloo has no sum with a factor; a tokenizer of bytes and
random tokens in place of files; the backend "partial_dtensor", since "spmd_types" fails on torch 2.13 for AdamW too.
Import torchtitan through this module.
"""
# ruff: noqa: E402, I001

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

__all__ = ["MuonContainer", "Recorder", "Trainer", "apply_overrides", "config", "deepseek_v3", "gpt_oss", "llama3"]


class Device(types.SimpleNamespace):
    """torch.cpu, and what only accelerators have: no memory is used and none is there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_DEVICE = Device(
    __name__="torch.cpu",
    current_device=lambda: 0,
    device_count=lambda: 8,
    set_device=lambda _: None,
    empty_cache=lambda: None,
    reset_peak_memory_stats=lambda: None,
    memory_stats=lambda _=None: {},
    get_device_name=lambda _=None: "CPU",
    get_device_properties=lambda _=None: types.SimpleNamespace(total_memory=1 << 30),
)

with mock.patch.multiple(  # torchtitan asks once, when it is imported
    torch._utils, _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: _DEVICE
):
    import torchtitan.tools.utils  # noqa: F401

with mock.patch.object(torch, "compile", lambda function, **_: function):  # of the mask alone, see `causal`
    from torchtitan.models.common.attention import FlexAttention

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.metrics import BaseLogger
from torchtitan.config.override import apply_overrides, parse_cli_imports
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import fsdp
from torchtitan.models import deepseek_v3, gpt_oss, llama3
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from muonmesh.integrations.torchtitan import MuonContainer

VOCABULARY, WIDTH = 64, 32


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, enable_gqa: bool, **_: Any) -> tuple[Tensor, None]:
    """Attention to all that came before: what the mask of sequences of one document each says."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


FlexAttention._compiled_flex_attn = staticmethod(causal)
torch.distributed.set_timeout = lambda *_: None  # which torch 2.13 does not have yet
_undivided = fsdp.disable_fsdp_gradient_division


def summed(model: nn.Module) -> None:
    """Add gradients up as torchtitan asks FSDP2 to, by a sum: gloo has no sum with a factor."""
    _undivided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = summed


class Recorder(BaseLogger):
    """Keeps what the trainer logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append(dict(metrics))


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Random(IterableDataset[Any]):
    """Sequences that depend on their number and the rank alone; says and takes back where it is."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.number = rank, length, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.number)
            tokens = torch.randint(VOCABULARY, (self.length + 1,), generator=generator)
            self.number += 1
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Tokens(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        super().__init__(
            Random(dp_rank, seq_len),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


def config(folder: Path, overrides: list[str], load_step: int = -1, **parallelism: Any) -> Trainer.Config:
    """Return torchtitan's own configuration of its debug Llama, with two layers, short sequences and a checkpoint."""
    trainer = config_registry.llama3_debugmodel()
    model = trainer.model_spec.model
    rope = replace(model.layers[0].attention.rope, dim=WIDTH // 4, max_seq_len=64)
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
    model.layers = llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex")
    model.dim = model.norm.normalized_shape = WIDTH
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = WIDTH
    model.vocab_size = model.lm_head.out_features = model.tok_embeddings.num_embeddings = VOCABULARY
    trainer.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    trainer.tokenizer, trainer.dataloader = Bytes.Config(), Tokens.Config()
    trainer.dump_folder = str(folder)
    trainer.training = replace(
        trainer.training, local_batch_size=2, seq_len=16, steps=6, mixed_precision_param="float32", max_norm=1e-6
    )
    trainer.training.disable_cuda_graphs = True
    trainer.debug.seed = 0
    trainer.parallelism = replace(trainer.parallelism, spmd_backend="partial_dtensor", **parallelism)
    trainer.lr_scheduler = replace(trainer.lr_scheduler, total_steps=6)
    trainer.checkpoint = replace(trainer.checkpoint, enable=True, interval=3, load_step=load_step)
    trainer.activation_checkpoint = None
    trainer.validator = replace(trainer.validator, enable=False)
    trainer.override.imports = parse_cli_imports(overrides)
    return trainer
