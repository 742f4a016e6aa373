"""A loop of one's own with Lightning Fabric; under ModelParallelStrategy only ``strategy`` is another.

python examples/fabric_loop.py
torchrun --nproc-per-node 2 examples/fabric_loop.py     # DDP
"""

import os

import lightning
import torch
from torch import nn

from muonmesh.integrations.lightning import from_model

devices = int(os.environ.get("WORLD_SIZE", 1))
fabric = lightning.Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=devices,
    strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
)
fabric.launch()
fabric.seed_everything(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(from_model(fabric, model, lr=1e-2))
optimizer.metrics()  # from here on updates are recorded
for _ in range(10):
    inputs, labels = torch.randn(8, 16, device=fabric.device), torch.randint(4, (8,), device=fabric.device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    fabric.backward(loss)
    optimizer.clip_grad_norm_(1.0, skip_above=50.0)
    optimizer.step()
figures = optimizer.metrics()
fabric.save("saved.ckpt", {"model": model, "optimizer": optimizer})
fabric.print(f"loss {loss.item():.3f}, update to weight {figures['muon/update_to_weight']:.4f}")
