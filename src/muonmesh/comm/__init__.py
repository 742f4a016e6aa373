"""All communication between ranks, and the layouts of tensors as parts of whole parameters.

- Reading: `storage` says where a tensor lives, `placing` finds it, and `layout_readers` asks what integrations know of
  it. `sharing` cuts the momentum of replicas. `ranks` has what a process knows of ranks without asking. `gradients`
  finds the gradient of a parameter. `views` cuts pieces out of memory. `wrappers` finds the DDP that averages plain
  tensors.
- Meeting: in `meeting`, ranks wait for each other, and errors name the missing ranks. In `same_plan`, they compare
  plans. In `copies`, they find parameters of which several ranks hold equal copies. `telling` sends Python objects, and
  errors, to all ranks. By an `agreement`, they ask each other in one reduced vector whether any rank failed, must plan
  again or differs. `process_groups` finds or makes their groups.
- Moving, in every step: `exchange` runs a plan by a `schedule`. A `passage` holds the pieces of one transfer.
  `companions` moves state by row, column or matrix. `matrix_sums` computes the sums that rules need. All of them send
  through `wire`, and call the optimizer by the methods of `work`. `to_owners` averages gradients at the owners, during
  the backward pass.
"""
