"""Checkpoints of other optimizers, read and converted; and which checkpoints of a run stay."""
