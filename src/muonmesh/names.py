"""Canonical parameter names: the same with and without torch.compile, DDP or activation checkpointing."""

from __future__ import annotations

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    ``_orig_mod`` (torch.compile), ``_checkpoint_wrapped_module`` and ``_fsdp_wrapped_module`` go wherever they
    stand; ``module`` only in front (DDP), since models have modules of that name.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)
