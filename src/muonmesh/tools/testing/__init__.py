"""Testing: what `muonmesh.testing` offers: proofs of rules and dry runs."""
