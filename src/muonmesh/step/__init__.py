"""One optimizer step; the modules are listed in the order in which a step uses them.

1. `members`, `planning` and `connection` turn param groups into a Plan, which the ranks compare once. `state_layout`
   says where the tensors of the state lie.
2. `parameter_steps` collects what this rank stores of each parameter, with its gradient and its state.
3. `preflight` lets all ranks agree before any rank writes, by the `flag_vector`, the `settings_digest` and the
   `replicas`.
4. `ready` creates missing state and makes local tensors contiguous. `muon_step` folds the momentum, and reads,
   computes and writes what the exchange asks for. On a device, `device_step` takes the pieces of many matrices at once.
   `elementwise_step`, AdamW's half of the step, runs under the first gather. For these, `stack` works on equal matrices
   together, `stored_companions` reads state by row, column or matrix, `blocks` holds int8 momentum, `offload` and
   `device_copies` bring state from the host, and `stochastic_rounding` numbers the elements.

`runtime` holds what an optimizer keeps from one step to the next, and `precision` its dtypes. `makers` refuses
frameworks that construct a Muon with parameters other than the model's. `update_squares` adds up what `Muon.metrics`
reports. `untrained` warns of parameters that do not learn.
"""
