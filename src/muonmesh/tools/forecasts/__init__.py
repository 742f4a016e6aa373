"""Forecasts: the cost of a step on a cluster that is not here, and learning rates for another width."""
