"""Canonical parameter names: the same with and without torch.compile, DDP or activation checkpointing."""

from __future__ import annotations

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_original_module")
"""Children by which a wrapper holds what it stands for: of torch.compile, activation checkpointing, FSDP1, and twice of
Lightning Fabric, which also holds the model as it was given."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    `WRAPPERS` go wherever they stand; ``module`` only in front (DDP and others), since models have modules of that
    name. PEFT's ``base_model.model`` stays: its checkpoints have it too.
    """
    *modules, key = name.split(".")
    parts = [part for part in modules if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join([*parts, key])
