"""Muon for PyTorch that computes the same update whatever holds the matrix."""
