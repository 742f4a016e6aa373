"""The errors a user can meet. Each message has four parts: parameter, what was found, what is needed, what to write."""

from __future__ import annotations


class MuonMeshError(Exception):
    """Base of the errors that muonmesh defines itself; wrong arguments are plain ValueError or TypeError."""


class LayoutError(MuonMeshError, ValueError):
    """A parameter or gradient is held in a way that cannot be mapped to whole matrices."""


class PlanError(MuonMeshError, RuntimeError):
    """The ranks disagree about what to orthogonalise where, or another rank found an error."""


class StateError(MuonMeshError, RuntimeError):
    """Optimizer state does not fit the parameters or the settings it is loaded into."""


def explain_error(parameter: str, found: str, needed: str, write: str) -> str:
    """Compose the four parts every message has: which parameter, what was found, what is needed, what to write."""
    return f"{parameter}: found {found}; needed {needed}. {write}"
