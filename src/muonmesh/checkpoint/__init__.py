"""Checkpoint: a model's and its optimizer's state, written so that any layout can read it and nothing can execute."""

from muonmesh.checkpoint.saved import load, save

__all__ = ["load", "save"]
