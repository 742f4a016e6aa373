"""One optimizer step; the modules are listed in the order in which a step uses them.

1. `members`, `planning` and `connection` turn param groups into a Plan, which the ranks compare once by `comparison`.
   `placed_state` and `state_layout` give the layout of the tensors of the state.
2. `parameter_steps` collects the local part of each parameter, with its gradient and its state, and `state_form` checks
   its state. `steady` finds by a `snapshot` that nothing has changed since the last step, so that nothing is planned,
   checked or collected again.
3. `nonzero` finds the gradients that are not zero. `preflight` lets all ranks agree before any rank writes, by the
   `flag_vector`, the `settings_digest` and the `replicas`.
4. `ready` creates missing state and makes local tensors contiguous. `muon_step` prepares, computes and finalizes for
   the exchange: by the parts of rules in `by_parts`, or by one launch of a kernel in `by_kernel`. `columns` has what a
   matrix is in a step, and `stored_companions` its state by row, column or matrix. `elementwise_step` steps AdamW's
   parameters during the first gather.
5. State that is kept otherwise than it is computed with has a codec: `int8_codec`, on the `blocks` of int8 momentum,
   and `device_copies`, by which `offload` copies state from CPU memory. `stochastic_rounding` numbers the elements.

`runtime` holds the runtime state of an optimizer between steps, and `precision` its dtypes. `update_squares` adds
up what `Muon.metrics` reports. `untrained` warns of parameters that do not learn. `profiled` names the parts of a step
for torch's profiler.
"""
