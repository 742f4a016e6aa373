"""Checkpoints of other optimizers and of DeepSpeed's engine, read and converted."""
