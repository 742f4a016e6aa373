"""Clip: clipping by norm for an optimizer of two halves, of which only one cares for magnitudes.

`clipping` is one call of `Muon.clip_grad_norm_`: it fills the vector of `squares`, which all ranks add up, compares the
norms with the `limits`, scales the gradients by what follows, and returns the norms. `running` is what the policy
"per_matrix" does instead to Muon's half.
"""
