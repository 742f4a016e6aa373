"""Comm: everything that one rank learns from another, and how tensors are read as parts of whole parameters.

- Reading: `storage` (where a tensor lives), `gradients`, `views`.
- Meeting: `meeting` (ranks wait for each other, and say who is missing), `agreement` (ranks compare their plans).
- Moving, at every step: `exchange` runs a plan by `owner` (which replays a `schedule`), `gram` and `carried`; `totals`
  adds up what rules ask for. All of them send through `wire`, and ask the optimizer for what `work` lists.
"""
