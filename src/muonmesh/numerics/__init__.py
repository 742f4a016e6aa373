"""Tensor math on whole matrices, without ranks and shards."""
