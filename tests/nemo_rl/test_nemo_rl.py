"""NeMo-RL's own DTensor policy worker on two gloo ranks, with the class that its configuration names.

NeMo-RL is in no package: NEMO_RL is a checkout. Real are the worker with its configuration, FSDP2, TP, its loss, norm
and clipping, its schedule and its checkpoint. Not run: Ray's processes, rollouts, and the second worker (``_v2``). That
needs NeMo AutoModel, whose 0.7.0 wants ``transformers.utils.hub.resolve_revision``; transformers 5.11 has it not, and
NeMo-RL refuses 5.12. What the second worker gives an optimizer's class is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from tests.hosts.replay import Given, different, replayed, weights
from tests.hosts_all import without_loggers
from tests.nemo_rl.on_cpu import on_cpu
from tests.support import workers

FOLDERS = [str(Path(__file__).parents[2] / "examples"), os.environ["NEMO_RL"]]
sys.path += FOLDERS  # of this process, and of its ranks
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *FOLDERS)))
os.environ |= {"HF_HUB_OFFLINE": "1", "NRL_DISABLE_NUMA_BINDING": "1"}
WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker"
multiprocessing.set_forkserver_preload(
    [workers.__name__, "muonmesh.build", *workers.MODELS, without_loggers.__name__, WORKER]
)

SETTINGS = {"lr": 0.01, "weight_decay": 0.3, "momentum": 0.8, "adamw_betas": (0.8, 0.9)}


@pytest.fixture(scope="module")
def pair() -> Iterator[workers.Pool]:
    pool = workers.Pool(2)
    yield pool
    pool.close()


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


def nemo_steps(worker: Any, steps: range) -> list[Given]:
    """Train with the worker's own method; return what its optimizer was given."""
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    inputs: list[Given] = []
    worker.optimizer.register_step_pre_hook(lambda *_: inputs.append(Given.to(worker.optimizer)))
    for step in steps:
        replica = worker.dp_mesh.get_local_rank()
        tokens = torch.randint(
            64, (4 // worker.dp_size, 6), generator=torch.Generator().manual_seed(10 * step + replica)
        )
        batch = {"input_ids": tokens, "input_lengths": torch.full((len(tokens),), 6)}
        masks = {"token_mask": torch.ones(len(tokens), 6), "sample_mask": torch.ones(len(tokens))}
        worker.train(BatchedDataDict({**batch, **masks}), NLLLossFn())
        worker.move_optimizer_to_device("cpu")  # as between training and rollouts
    return inputs


def trained_by_nemo(folder: str, checkpoint: str, tensor_parallel: int) -> dict[str, Any]:
    with on_cpu():
        worker = worker_of(folder, tensor_parallel)
        optimizer = worker.optimizer
        inputs = nemo_steps(worker, range(2))
        paths = f"{checkpoint}/weights", f"{checkpoint}/optimizer"
        worker.save_checkpoint(*paths)
        inputs += nemo_steps(worker, range(2, 4))[:2]
        after = weights(worker.model)
        second = worker_of(folder, tensor_parallel, *paths)
        nemo_steps(second, range(2, 4))
        resumed = weights(second.model)
    settings = {**SETTINGS, "compute_dtype": torch.float32}
    plain = replayed(LlamaForCausalLM.from_pretrained(folder), inputs[:2] + inputs[-2:], **settings)
    return {
        "muon": type(optimizer) is mm.Muon,
        "matrices": len(optimizer.param_groups[0]["params"]),
        "plain loop": different(after, plain),
        "resumed": different(after, resumed),
        "rates": [set(given.rates.values()) for given in inputs[:4]],  # the first hook goes on
    }


@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["FSDP2", "TP"])
def test_the_worker_s_steps_are_those_of_a_plain_loop(
    pair: workers.Pool, folder: str, tmp_path: Path, tensor_parallel: int
) -> None:
    for result in pair.run(trained_by_nemo, folder, str(tmp_path), tensor_parallel, timeout=400):
        assert result["muon"]
        assert result["matrices"] == 14
        assert result["plain loop"] == []
        assert result["resumed"] == []
        assert result["rates"] == [{0.01}, {0.005}, {0.0025}, {0.00125}]


def test_the_model_is_found_in_what_either_worker_gives() -> None:
    from nemo_rl_muon import Muon

    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 8))
    of_both = [Muon(model.parameters(), lr=1e-3), Muon((p for p in model.parameters() if p.requires_grad), lr=1e-3)]
    for optimizer in of_both:
        assert optimizer.param_groups[0]["param_names"] == ["1.weight"]
    with pytest.raises(TypeError, match="which knows the model"):
        Muon(list(model.parameters()), lr=1e-3)
