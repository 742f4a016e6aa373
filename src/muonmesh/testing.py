"""For your own tests: checks that a rule does not depend on sharding, and counts what a step does on a device."""

from muonmesh.tools.forecasts.device_rates import DeviceRates as Rates
from muonmesh.tools.testing.dry_run import DryRun, dry_run
from muonmesh.tools.testing.launches import HostSync
from muonmesh.tools.testing.rules import prove_rule

__all__ = ["DryRun", "HostSync", "Rates", "dry_run", "prove_rule"]
