"""Step: one optimizer step, in the order in which it happens.

1. `members`, `planning` and `connection`: param groups become a Plan, which the ranks compare once. `state_layout` says
   where each thing lives that a rule keeps beside the weights.
2. `parameter_steps`: what this rank stores of each parameter, with its gradient and its state.
3. `preflight`, with the `flag_vector`, the `settings_digest` and the `replicas`: all ranks agree before any of them
   writes. `flags` is what they agreed on.
4. `muon`: momentum, and what the exchange reads, computes and writes; on a device `together` takes the pieces of many
   matrices at once. `elementwise`, AdamW's half, runs under the first gather.

`runtime` is what an optimizer keeps from one step to the next. `update_squares` counts for `Muon.metrics`; `idle`,
`unsuited` and `rounding` warn, and `late` is what the device has still to say.
"""
