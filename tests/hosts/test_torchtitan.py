"""torchtitan 0.3: its own trainer trains, logs, saves and resumes with `muonmesh.integrations.torchtitan`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm
from tests.hosts import titan
from tests.hosts.replay import Given, different, replayed, strengths, weights
from tests.hosts.world import launched
from tests.support.reference import split

COVERS = (
    "integrations.torchtitan.MuonContainer",
    "integrations.torchtitan.torchtitan_role",
)

LR = 0.01
MUON = f'muonmesh.integrations.torchtitan.muon={{"lr": {LR}, "compute_dtype": "float32"}}'
METRICS = "muonmesh.integrations.torchtitan.metrics"


def train_titan(folder: Path, load_step: int = -1, **parallelism: Any) -> tuple[Any, list[Given], dict[str, Any]]:
    """Train to the sixth step, with a checkpoint at the third; return the trainer, its gradients and first weights."""
    trainer = titan.config(folder, [MUON, METRICS], load_step, **parallelism).build()
    trainer.metrics_processor.logger = titan.Recorder()
    (optimizer,) = trainer.optimizers
    inputs: list[Given] = []
    before = weights(trainer.model_parts[0])
    real = optimizer.step

    def step(*args: Any, **settings: Any) -> Any:
        if settings.get("closure", 0) is not None:  # torchtitan makes state by a step of closure=None
            inputs.append(Given.to(optimizer))
        return real(*args, **settings)

    optimizer.step = step
    trainer.train()
    trainer.close()
    del optimizer.step
    return trainer, inputs, before


def titan_twice(folder: Path, parallelism: dict[str, int]) -> dict[str, Any]:
    """Train, train again from the middle, and replay the gradients in one process."""
    with launched():
        trainer, inputs, before = train_titan(folder, **parallelism)
        after = weights(trainer.model_parts[0])
        second, _, _ = train_titan(folder, 3, **parallelism)
        resumed = different(after, weights(second.model_parts[0]))
        placed = {str(tuple(p.placements)) for p in trainer.model_parts[0].parameters()}

    def model() -> nn.Module:
        fresh: nn.Module = titan.config(folder, []).model_spec.model.build()
        for name, parameter in fresh.named_parameters():
            parameter.data = before[name].clone()
        return fresh

    first = replayed(model(), inputs[:1], compute_dtype=torch.float32)
    return {
        "plain loop": different(after, replayed(model(), inputs, compute_dtype=torch.float32)),
        "resumed": resumed,
        "weakest": min(
            v for n, v in strengths(before, first, LR / 2).items() if n.startswith("layers") and "norm" not in n
        ),
        "rows": trainer.metrics_processor.logger.rows,
        "again": second.metrics_processor.logger.rows,
        "placed": placed,
        "steps": len(inputs),
    }


def check_torchtitan(result: dict[str, Any]) -> None:
    assert result["plain loop"] == []
    assert result["resumed"] == []
    assert result["steps"] == 6
    losses, again = ([row["loss_metrics/global_avg_loss"] for row in result[key]] for key in ("rows", "again"))
    assert len(again) == 3
    assert losses[3:] == again
    assert result["weakest"] > 0.1  # of AdamW's RMS: a max_norm of 1e-6 stalls nothing
    rates = [row["lr/Muon/0"] for row in result["rows"]]
    assert rates[:2] == [LR / 2, LR]
    assert rates[-1] < rates[2]
    for row in result["rows"][1:]:
        assert row["muon/muon/update_to_weight"] > 0


@pytest.mark.parametrize(
    ("ranks", "parallelism", "placement"),
    [
        (1, {}, "Shard(dim=0)"),
        (2, {"data_parallel_shard_degree": 2}, "Shard(dim=0)"),
        (2, {"tensor_parallel_degree": 2}, "Shard(dim=1)"),
        (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, "Replicate(), Shard(dim=0)"),
        (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, "Shard(dim=0), Shard(dim=1)"),
    ],
    ids=["one", "FSDP2", "TP", "HSDP", "FSDP2 over TP"],
)
def test_the_trainer(workers, ranks: int, parallelism: dict[str, int], placement: str, tmp_path: Path) -> None:
    for result in workers(ranks).run(titan_twice, tmp_path, parallelism, timeout=300):
        check_torchtitan(result)
        assert any(placement in placed.replace("_S", "S") for placed in result["placed"]), result["placed"]


# ------------------------------------------------------------------ parts of a pipeline


def llama() -> nn.Module:
    model: nn.Module = titan.config(Path(), []).model_spec.model.build()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def stages(model: nn.Module) -> list[nn.Module]:
    """Cut a model of two layers into two parts, as torchtitan's pipelines do: what a part lacks is None."""
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    del first.layers["1"], last.layers["0"]
    first.norm = first.lm_head = last.tok_embeddings = None
    return [first, last]


def container(parts: list[nn.Module]) -> Any:
    return titan.MuonContainer.Config(settings={"lr": LR, "compute_dtype": torch.float32}).build(model_parts=parts)


def step_parts(optimizers: Any, number: int) -> None:
    for part in optimizers.model_parts:
        for name, parameter in part.named_parameters():
            generator = torch.Generator().manual_seed(number + sum(map(ord, name)))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step()


def test_state_of_two_parts_loads_into_one_and_is_small() -> None:
    whole = llama()
    apart, single = container(stages(whole)), container([whole])
    step_parts(apart, 0)
    step_parts(single, 0)
    state = apart.state_dict()
    assert state.keys() == single.state_dict().keys()
    fresh = copy.deepcopy(whole)
    other = container([fresh])
    other.load_state_dict(state)
    for optimizers in (single, other):
        step_parts(optimizers, 1)
    assert different(weights(whole), weights(fresh)) == []
    step_parts(apart, 1)
    named = {name: value for part in apart.model_parts for name, value in part.named_parameters()}
    assert different(weights(whole), named) == []
    # Nothing of a group grows with the number of its parameters, of which each has all entries of its group.
    assert max(len(pickle.dumps(value)) for key, value in state.items() if key.startswith("param_groups")) < 200


def test_the_last_linear_of_a_part_without_head_is_muons() -> None:
    first, last = (optimizer.param_groups for optimizer in container(stages(llama())).optimizers)
    assert {g["name"] for g in first} == {"muon", "adamw.embeddings", "adamw.vectors"}
    assert "layers.0.feed_forward.w2.weight" in first[0]["param_names"]
    assert [n for g in last if g["name"] == "adamw.head" for n in g["param_names"]] == ["lm_head.weight"]


# ------------------------------------------------------------------ fused parameters


def muon_matrices(model: nn.Module) -> dict[str, Any]:
    (muon, *_) = mm.split_params(model)
    return dict(zip(muon["param_names"], muon["matrices"], strict=True))


def test_fused_parameters_are_taken_apart_as_their_modules_do() -> None:
    """torchtitan saves q, k and v apart, which is what they are compared with."""
    model = llama()
    fused = model.layers["0"].attention.qkv_linear
    pieces = split(fused.wqkv.weight.detach(), muon_matrices(model)["layers.0.attention.qkv_linear.wqkv.weight"])
    apart = [fused.state_dict()[f"{name}.weight"] for name in ("wq", "wk", "wv")]
    assert all(torch.equal(*pair) for pair in zip(pieces, apart, strict=True))
    with torch.device("meta"):
        deepseek = titan.deepseek_v3.model_registry("debugmodel").model.build()
        experts = titan.gpt_oss.model_registry("debugmodel").model.build()
    attention = deepseek.layers["1"].attention
    splits = muon_matrices(deepseek)
    sizes = (attention.kv_lora_rank, attention.qk_rope_head_dim)
    assert splits["layers.1.attention.wkv_a.weight"] == ("rows", *sizes)
    sizes = (attention.qk_nope_head_dim, attention.v_head_dim)
    assert splits["layers.1.attention.wkv_b.weight"] == ("interleaved", sizes, 0)
    gates = {m for n, m in muon_matrices(experts).items() if n.endswith("mlp1_weight_EGD")}
    assert gates == {("stack", ("interleaved", 2, 0))}


def test_an_override_without_a_rate_or_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    trainer_config = titan.config(tmp_path, ["muonmesh.integrations.torchtitan.muon={}"])
    with pytest.raises(TypeError, match="no lr"):
        titan.apply_overrides(trainer_config.override, trainer_config)
    from muonmesh.integrations.torchtitan import MuonContainer, muon  # after titan has made torchtitan take the CPU

    config = MuonContainer.Config(settings={"lr": 1.0, "momentun": 0.9})
    with pytest.raises(TypeError, match=r"the argument 'momentun'; .* Write momentum="):
        MuonContainer(config, model_parts=[nn.Linear(4, 4)])
    for_adam = MuonContainer.Config(implementation="fused_opt_states_bf16")
    config = muon(for_adam, lr=1.0)
    with pytest.raises(ValueError, match=r'found implementation=.*Write settings={"state_dtype": "bfloat16"}'):
        config.build(model_parts=[nn.Linear(4, 4)])
