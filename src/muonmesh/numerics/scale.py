"""Scale: the factor between an orthogonalized direction and the change of the weights."""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple, TypeAlias, get_args

from muonmesh.errors import explain_error

ScaleMode: TypeAlias = Literal["original", "shape_scaling", "match_rms_adamw", "spectral", "unit_rms_norm", "none"]
"""The factor of the update of a matrix, see `update_scale`. "shape_scaling" is an alias of "original"."""


def update_scale(rows: int, cols: int, mode: ScaleMode) -> float:
    """Return the factor that an orthogonalized update is multiplied by.

    An orthogonal rows × cols matrix has spectral norm 1 and RMS 1/√max(rows, cols). So the spectral norm of one step is
    the learning rate times this factor.

    Args:
        rows: Output features of the whole matrix, never of a shard.
        cols: Input features of the whole matrix, never of a shard.
        mode: One of
            "original", alias "shape_scaling": √max(1, rows/cols) (K. Jordan, torch.optim.Muon);
            "match_rms_adamw": 0.2·√max(rows, cols), an RMS of 0.2 as AdamW's updates have (Moonlight,
            arXiv 2502.16982), so one learning rate serves Muon and AdamW;
            "spectral": √max(rows, cols), an RMS of 1 (Transformer Engine);
            "unit_rms_norm": √(rows/cols), RMS-to-RMS operator norm 1 (Scion, arXiv 2502.07529; dion);
            "none": 1.

    Returns:
        The factor, a finite number above 0.

    Raises:
        ValueError: `mode` is unknown, or `rows` or `cols` is smaller than 1.
        TypeError: `rows` or `cols` is not an int.
    """
    for name, size in (("rows", rows), ("cols", cols)):
        if isinstance(size, bool) or not isinstance(size, int):
            description = f"{size!r} ({type(size).__name__})"
            raise TypeError(explain_error(name, description, "an int", "Pass matrix.shape"))
        if size < 1:
            needed = "at least 1: an empty matrix has no update"
            raise ValueError(explain_error(name, f"{size}", needed, "Skip it"))
    if mode not in get_args(ScaleMode):
        modes = ", ".join(repr(name) for name in get_args(ScaleMode))
        raise ValueError(explain_error("mode", f"{mode!r}", f"one of {modes}", 'Write mode="match_rms_adamw"'))
    match mode:
        case "original" | "shape_scaling":
            return sqrt(max(1.0, rows / cols))
        case "match_rms_adamw":
            return 0.2 * sqrt(max(rows, cols))
        case "spectral":
            return sqrt(max(rows, cols))
        case "unit_rms_norm":
            return sqrt(rows / cols)
        case "none":
            return 1.0


class StepSize(NamedTuple):
    """The size of one step on a matrix: its root mean square and its spectral norm."""

    rms: float
    spectral: float
