"""The Trainer of `transformers` with Muon: a tiny Llama on random tokens.

python examples/trainer.py
torchrun --nproc-per-node 2 examples/trainer.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from muonmesh.integrations.transformers import MuonCallback, MuonFactory

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
)
tokens = torch.randint(256, (64, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    "trained",
    max_steps=8,
    per_device_train_batch_size=4,
    learning_rate=1e-2,  # of both halves
    weight_decay=0.1,
    logging_steps=2,
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model,
    args,
    train_dataset=data,
    optimizer_cls_and_kwargs=(MuonFactory, {"args": args}),
    # AdamW's half is clipped by its own norm; a step whose norm is above 50 changes nothing.
    callbacks=[MuonCallback(clip=1.0, skip_above=50, metrics=True)],
)
trainer.train()
if trainer.is_world_process_zero():
    print(trainer.optimizer.optimizer)
    print(f"trained by {args.world_size} processes")
