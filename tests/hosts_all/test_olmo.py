"""OLMo-core's own train module under its FSDP on two gloo ranks, with the optimizer config of docs/hosts.md.

Real are the model, its sharding, the config, clipping, and the state in a file; not run is its Trainer, whose loop is
replaced by the lines of `turn`.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_core.config import DType
from olmo_core.distributed import parallel
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import OptimConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModule

import muonmesh as mm
from tests.hosts.replay import Given, different, replayed, weights
from tests.support import workers
from tests.support.workers import Pool

pytest_plugins = ("tests.support.engines",)
multiprocessing.set_forkserver_preload([workers.__name__, "muonmesh.build", "olmo_core.train.train_module"])

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "compute_dtype": torch.float32}


@dataclass
class MuonConfig(OptimConfig):
    @classmethod
    def optimizer(cls) -> type[mm.Muon]:
        return mm.Muon

    def build(self, model: torch.nn.Module, strict: bool = True) -> mm.Muon:
        optimizer = mm.from_model(model, **SETTINGS)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # which OLMo-core's schedulers read
        return optimizer


def fresh() -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = TransformerConfig.llama_like(vocab_size=64, d_model=32, n_layers=2, n_heads=4).build(
        init_device="cpu"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def module() -> TransformerTrainModule:
    parallel._WORLD_MESH = None  # a process may make one mesh only; a resumed run is another process
    split = TransformerDataParallelConfig(name=DataParallelType.fsdp, reduce_dtype=DType.float32)
    train_module = TransformerTrainModule(
        fresh(), MuonConfig(), 32, 16, dp_config=split, max_grad_norm=1.0, device=torch.device("cpu")
    )
    first = dict(fresh().named_parameters())  # OLMo-core has initialized the shards anew
    with torch.no_grad():
        for name, parameter in train_module.model.named_parameters():
            whole = torch.distributed.tensor.distribute_tensor(
                first[name].detach(), parameter.device_mesh, parameter.placements
            )
            parameter.copy_(whole)
    return train_module


def train_step(train_module: TransformerTrainModule, number: int) -> Given:
    train_module.zero_grads()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    logits = train_module.model(tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    train_module._clip_grad_norm(1.0)
    inputs = Given.to(train_module.optim)
    train_module.optim.step()
    return inputs


def trained_by_olmo(folder: Path) -> tuple[list[str], list[str], dict[str, int], bool]:
    train_module = module()
    inputs = [train_step(train_module, number) for number in range(2)]
    dcp.save(train_module.state_dict_to_save(), checkpoint_id=folder)
    inputs += [train_step(train_module, number) for number in range(2, 4)]
    after = weights(train_module.model)
    again = module()
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state)
    for number in range(2, 4):
        train_step(again, number)
    sizes = {g["name"]: len(g["params"]) for g in train_module.optim.param_groups}
    plain = replayed(fresh(), inputs, **SETTINGS)
    return different(after, plain), different(after, weights(again.model)), sizes, "lm_head.w_out.weight" in after


def test_its_train_module_is_a_plain_loop_and_resumes(pair: Pool, tmp_path: Path) -> None:
    for plain, resumed, sizes, head in pair.run(trained_by_olmo, tmp_path, timeout=200):
        assert plain == []
        assert resumed == []
        assert sizes == {"muon": 14, "adamw.embeddings": 1, "adamw.head": 1, "adamw.vectors": 5}
        assert head
