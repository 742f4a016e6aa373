"""What docs/hosts.md says to write runs, but for the loop over ranks that test_accelerate has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from trl import DPOConfig, DPOTrainer

import muonmesh as mm
from tests.hosts.tiny import Tokens, llama, sentences, tokenizer
from tests.hosts.world import launched
from tests.support.pages import run


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def test_the_page_about_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {"max_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    chosen, rejected = ([f" {text}" for text in sentences(length=length)] for length in (5, 4))
    preferences = Dataset.from_dict({"prompt": sentences(), "chosen": chosen, "rejected": rejected})
    with launched():
        dpo = DPOConfig(str(tmp_path / "dpo"), bf16=False, **common)
        preferring = {"DPOTrainer": DPOTrainer, "args": dpo, "preferences": preferences, "tokenizer": tokenizer()}
        lora = LoraConfig(r=4, target_modules=["q_proj"])
        accelerating = {
            "accelerator": Accelerator(cpu=True),
            "model": llama(),
            "loader": DataLoader(Tokens(), batch_size=8),
            "schedule_of": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        }
        adapting = {"mm": mm, "get_peft_model": get_peft_model, "lora": lora, "model": llama()}
        comparing = {**preferring, "model": llama(), "reference": llama()}
        quiet = {"accelerator": "cpu", "max_steps": 2, "logger": False, "default_root_dir": tmp_path}
        training = {"lightning": lightning, "Net": Net, "settings": quiet, "loader": DataLoader(Tokens(), batch_size=8)}
        weaving = {"fabric": lightning.Fabric(accelerator="cpu", devices=1), "model": llama()}
        pages = run("docs/hosts.md", {}, comparing, adapting, accelerating, training, weaving)
        assert next(pages)["trainer"].state.global_step == 8
        assert next(pages)["trainer"].state.global_step == 2
        assert [group["algorithm"] for group in next(pages)["optimizer"].param_groups] == ["muon"]
        assert next(pages)["optimizer"].optimizer.param_groups[0]["lr"] < 1e-2
        assert next(pages)["trainer"].global_step == 2
        assert isinstance(next(pages)["optimizer"], mm.Muon)
