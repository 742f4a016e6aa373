"""Flags: what all ranks have agreed on before a step writes anything."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Flags:
    """What all ranks agreed on before anything was written.

    Attributes:
        nonzero: For each Matrix whether any rank has a non-zero gradient in it: booleans. Where the host does not wait
            for them (CUDA), a bool tensor (n,), whose entries are false too if ``stop`` is true.
        present: For each Muon parameter whether any rank has a gradient. Where the host does not wait it knows of this
            rank alone, so there it is whether this rank has one.
        skip: Whether some rank says that this step changes nothing.
        overflow: Whether some rank's GradScaler has found an overflow: a 0-d bool tensor.
        only_creates_state: Whether this is the step by which torch's checkpoint code creates state: learning
            rate 0 and every gradient exactly zero.
        stop: 0-d bool tensor, true if some rank found an error or skips, which the host does not know yet; None where
            the host waits for the flags: on a CPU, and anywhere at learning rate 0.
        only_zeros: Whether the host knows that nothing can stop this step, so that only matrices whose gradient is
            exactly zero are left alone.
        replan: Whether some rank has other parameters than planned; nothing else counts then.
    """

    nonzero: list[bool] | Tensor
    present: list[bool]
    overflow: Tensor
    skip: bool = False
    only_creates_state: bool = False
    stop: Tensor | None = None
    replan: bool = False
    only_zeros: bool = False
