"""Tensor maths on whole matrices; nothing here knows of ranks or shards."""
