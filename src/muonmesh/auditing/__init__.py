"""Auditing: what a step of anybody's optimizer does to each weight, found by watching one."""
