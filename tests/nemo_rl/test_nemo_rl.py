"""NeMo-RL's own DTensor policy worker on two gloo ranks, with the class that its configuration names.

NeMo-RL is in no package: NEMO_RL is a checkout. Real are the worker with its configuration, FSDP2, TP, its loss, norm
and clipping, its schedule and its checkpoint. Not run: Ray's processes, rollouts, and the second worker (``_v2``). That
needs NeMo AutoModel, whose 0.7.0 wants ``transformers.utils.hub.resolve_revision``; transformers 5.11 has it not, and
NeMo-RL refuses 5.12. What the second worker gives an optimizer's class is tested.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hosts_all import without_loggers
from tests.nemo_rl.on_cpu import on_cpu
from tests.support.engines import SAME, prepare_ranks, train_and_resume
from tests.support.workers import Pool

pytest_plugins = ("tests.support.engines",)
WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker"
prepare_ranks(without_loggers.__name__, WORKER, folders=[os.environ["NEMO_RL"]], NRL_DISABLE_NUMA_BINDING="1")

SETTINGS = {"lr": 0.01, "weight_decay": 0.3, "momentum": 0.8, "adamw_betas": (0.8, 0.9)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two layers; nothing is downloaded."""
    path = tmp_path_factory.mktemp("nemo_rl")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)).save_pretrained(path)
    return str(path)


def worker_of(folder: str, tensor_parallel: int, *checkpoint: str) -> Any:
    """Return the worker, as Ray's actor makes it in its process."""
    import ray
    from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorkerImpl

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    off = {"enabled": False}
    parallel = {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": tensor_parallel,
        "context_parallel_size": 1,
        "custom_parallel_plan": None,
    }
    config = {
        "model_name": folder,
        "precision": "float32",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_grad_norm": 1e-3,
        "offload_optimizer_for_logprob": True,
        "dtensor_cfg": parallel,
        "sequence_packing": off,
        "dynamic_batching": off,
        "optimizer": {"name": "nemo_rl_muon.Muon", "kwargs": {**SETTINGS, "compute_dtype": "torch.float32"}},
        "scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}},
    }
    with mock.patch.object(ray, "get_gpu_ids", return_value=[0]):
        return DTensorPolicyWorkerImpl(
            config,
            SimpleNamespace(pad_token_id=0, eos_token_id=1),
            weights_path=checkpoint[0] if checkpoint else None,
            optimizer_path=checkpoint[1] if checkpoint else None,
            init_reference_model=False,
        )


def nemo_steps(worker: Any, steps: range) -> None:
    """Train with the worker's own method."""
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    for step in steps:
        replica = worker.dp_mesh.get_local_rank()
        tokens = torch.randint(
            64, (4 // worker.dp_size, 6), generator=torch.Generator().manual_seed(10 * step + replica)
        )
        batch = {"input_ids": tokens, "input_lengths": torch.full((len(tokens),), 6)}
        masks = {"token_mask": torch.ones(len(tokens), 6), "sample_mask": torch.ones(len(tokens))}
        worker.train(BatchedDataDict({**batch, **masks}), NLLLossFn())
        worker.move_optimizer_to_device("cpu")  # as between training and rollouts


def trained_by_nemo(folder: str, checkpoint: str, tensor_parallel: int) -> dict[str, Any]:
    paths = f"{checkpoint}/weights", f"{checkpoint}/optimizer"
    with on_cpu():
        return train_and_resume(
            worker_of(folder, tensor_parallel),
            nemo_steps,
            lambda worker: worker.save_checkpoint(*paths),
            lambda: worker_of(folder, tensor_parallel, *paths),
            lambda worker: worker.model,
            LlamaForCausalLM.from_pretrained(folder),
            **{**SETTINGS, "compute_dtype": torch.float32},
        )


@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["FSDP2", "TP"])
def test_the_worker_s_steps_are_those_of_a_plain_loop(
    pair: Pool, folder: str, tmp_path: Path, tensor_parallel: int
) -> None:
    for result in pair.run(trained_by_nemo, folder, str(tmp_path), tensor_parallel, timeout=400):
        assert result == {**SAME, "rates": [{0.01}, {0.005}, {0.0025}, {0.00125}]}


def test_the_model_is_found_in_what_either_worker_gives() -> None:
    from nemo_rl_muon import Muon

    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 8))
    of_both = [Muon(model.parameters(), lr=1e-3), Muon((p for p in model.parameters() if p.requires_grad), lr=1e-3)]
    for optimizer in of_both:
        assert optimizer.param_groups[0]["param_names"] == ["1.weight"]
    with pytest.raises(TypeError, match="which knows the model"):
        Muon(list(model.parameters()), lr=1e-3)
