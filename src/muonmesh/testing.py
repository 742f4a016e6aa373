"""For your own tests: checks that a rule does not depend on sharding."""

from muonmesh.tools.testing import prove_rule

__all__ = ["prove_rule"]
