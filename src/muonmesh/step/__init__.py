"""Step: one optimizer step, in the order in which it happens.

1. `planning` and `connection`: param groups become a Plan, which the ranks compare once.
2. `slots`: what this rank stores of each parameter, with its gradient and its state.
3. `preflight`, with the `census` of flags and the `terms`: all ranks agree before any of them writes.
4. `muon`: momentum, and what the exchange reads, computes and writes; `adamw` runs under the first gather.

`kept` is what an optimizer keeps from one step to the next.
"""
