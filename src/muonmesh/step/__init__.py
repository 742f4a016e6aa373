"""One optimizer step; the modules are listed in the order in which a step uses them.

1. `members`, `planning` and `connection` turn param groups into a Plan, which the ranks compare once by `comparison`.
   `state_layout` gives the layout of the tensors of the state.
2. `parameter_steps` collects the local part of each parameter, with its gradient and its state. `steady` finds that
   nothing has changed since the last step, so that nothing is planned, checked or collected again.
3. `preflight` lets all ranks agree before any rank writes, by the `flag_vector`, the `settings_digest` and the
   `replicas`.
4. `ready` creates missing state and makes local tensors contiguous. `muon_step` folds the momentum, and reads,
   computes and writes for the exchange. On a device, `device_step` takes the pieces of many matrices at once.
   `elementwise_step` steps AdamW's parameters during the first gather. For these modules, `stack` works on equal
   matrices together, `stored_companions` reads state by row, column or matrix, `blocks` holds int8 momentum, `offload`
   and `device_copies` copy state from CPU memory, and `stochastic_rounding` numbers the elements.

`runtime` holds the runtime state of an optimizer between steps, and `precision` its dtypes. `update_squares` adds
up what `Muon.metrics` reports. `untrained` warns of parameters that do not learn.
"""
