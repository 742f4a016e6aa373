"""Comm: everything that one rank learns from another, and how tensors are read as parts of whole parameters.

- Reading: `storage` (where a tensor lives), `gradients`, `views`, `wrappers` (who averages plain tensors).
- Meeting: `meeting` (ranks wait for each other, and say who is missing), `agreement` (ranks compare their plans).
- Moving, at every step: `exchange` runs a plan by `owner` (which replays a `schedule`) and `carried`;
  `matrix_sums` takes the sums that rules ask for. All of them send through `wire`, and ask
  the optimizer for what `work` lists.
"""
