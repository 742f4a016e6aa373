"""A LightningModule that its Trainer trains with Muon: clipped, scheduled, logged and saved by Lightning.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py     # DDP
"""

import os

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from muonmesh.integrations.lightning import MuonMetrics, MuonModule


class Model(MuonModule):
    muon = {"lr": 1e-2}
    muon_clip = {"skip_above": 50.0}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def training_step(self, batch, index):
        (tokens,) = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0)
data = TensorDataset(torch.randint(64, (160, 16)))
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
    max_epochs=1,
    gradient_clip_val=1.0,  # of AdamW's half; Muon does not feel a norm
    logger=CSVLogger("logs", flush_logs_every_n_steps=1),
    log_every_n_steps=1,
    callbacks=[LearningRateMonitor(), MuonMetrics()],
)
trainer.fit(Model(), DataLoader(data, batch_size=8))
