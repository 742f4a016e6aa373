"""One optimizer step; the modules are listed in the order in which a step uses them.

1. `members` and `planning` turn param groups into a Plan, which the ranks compare once in `connection`. `state_layout`
   has the dtypes, the layout, the form and the check of the tensors of the state, which `planning` places.
2. `parameters` reads the local part of each parameter, with its gradient and its state, as `parameter_steps`; or it
   finds that nothing has changed since the last step, so that nothing is planned, checked or collected again.
3. `preflight` lets all ranks agree before any rank writes, by the `flag_vector` and the `replicas`.
4. `parameters` creates missing state and makes local tensors contiguous. `muon_step` prepares, computes and finalizes
   for the exchange: by the parts of rules, or by one launch of a kernel in `by_kernel`. `stored_factored` has state
   by row, column or matrix. `elementwise_step` steps AdamW's parameters during the first gather.
5. State that is kept otherwise than it is computed with has a codec: `int8_momentum`, and `offload`, which copies state
   from CPU memory.

`runtime` holds the runtime state of an optimizer between steps. `untrained` warns of parameters that do not learn.
"""
