"""Clip: clipping by norm for an optimizer of two halves, of which only one cares for magnitudes.

`clipping` is one call of `Muon.clip_grad_norm_`: it fills the vector of `squares`, which all ranks add up, compares the
norms with the `limits`, scales the gradients by what follows, and returns the norms. `running` is what the policy
"per_matrix" does instead to Muon's half.
"""

from muonmesh.clip.clipping import PlanAgain, clip_gradients, stand_aside_from_sums
from muonmesh.clip.limits import ClipPolicy, GradNorms, Limits, scale_groups
from muonmesh.clip.running import keep_running_norms
from muonmesh.clip.squares import ERRORS, MATRICES, half_of, matrices_from

__all__ = [
    "ERRORS",
    "MATRICES",
    "ClipPolicy",
    "GradNorms",
    "Limits",
    "PlanAgain",
    "clip_gradients",
    "half_of",
    "keep_running_norms",
    "matrices_from",
    "scale_groups",
    "stand_aside_from_sums",
]
