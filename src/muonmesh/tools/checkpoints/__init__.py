"""Checkpoints of other optimizers, read and converted."""
