"""Auditing: finds what a step of any optimizer does to each weight, by watching one step."""
