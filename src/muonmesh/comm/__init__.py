"""Everything that one rank learns from another rank, and how tensors are read as parts of whole parameters.

- Reading: `storage` says where a tensor lives. `gradients` finds its gradient. `views` cuts pieces out of memory.
  `wrappers` finds out who averages plain tensors.
- Meeting: in `meeting`, ranks wait for each other and say which rank is missing. In `agreement`, they compare plans.
- Moving, at every step: `exchange` runs a plan. `owner` moves the matrices by a `schedule`, and `companions` moves the
  numbers that rules keep by row, column or matrix. `matrix_sums` takes the sums that rules ask for. All of them send
  through `wire`, and ask the optimizer for what `work` lists.
"""
