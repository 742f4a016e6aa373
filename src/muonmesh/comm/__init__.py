"""Everything that one rank learns from another rank, and how tensors are read as parts of whole parameters.

- Reading: `storage` says where a tensor lives, and `published` reads layouts that other packages write on tensors.
  `gradients` finds the gradient of a parameter. `views` cuts pieces out of memory. `wrappers` finds the DDP that
  averages plain tensors.
- Meeting: in `meeting`, ranks wait for each other and say which rank is missing. In `agreement`, they compare plans.
  In `copies`, they find parameters that they hold alike. `telling` sends Python objects, and errors, to all ranks.
- Moving, at every step: `exchange` runs a plan by a `schedule`. A `passage` holds the pieces of one transfer.
  `companions` moves the numbers that rules keep by row, column or matrix. `matrix_sums` takes the sums that rules ask
  for. All of them send through `wire`, and ask the optimizer for what `work` lists. `to_owners` averages gradients at
  the owners, during the backward pass.
"""
