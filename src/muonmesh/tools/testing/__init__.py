"""Testing: what `muonmesh.testing` offers: proofs of rules, dry runs, a simulated device."""
