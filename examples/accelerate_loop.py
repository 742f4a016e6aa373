"""A loop of one's own with Accelerate: the same script in one process, under DDP, FSDP2 and DeepSpeed.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from muonmesh.integrations.accelerate import from_model

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
data = TensorDataset(torch.randn(128, 16), torch.randint(4, (128,)))
optimizer = from_model(accelerator, model, lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # Muon does not feel it; AdamW does
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
accelerator.save_state("saved")
accelerator.print(f"loss {loss.item():.3f}, skipped {accelerator.optimizer_step_was_skipped}")
accelerator.print(f"trained by {accelerator.num_processes} processes")
