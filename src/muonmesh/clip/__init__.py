"""Clip: clips gradients by norm, for an optimizer in which only AdamW's step depends on the size of the gradients.

`clipping` implements one call of `Muon.clip_grad_norm_`. It fills the vector of `squares`, which all ranks add up,
compares the norms with the `limits`, scales the gradients, and returns the norms. `norm_means` keeps the running means
of the norms, of which ``skip_above`` may be a multiple.
"""
