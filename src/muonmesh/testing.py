"""For your own tests: checks that a rule does not depend on sharding, and runs steps on simulated devices."""

from muonmesh.tools.forecasts.device_rates import DeviceRates as Rates
from muonmesh.tools.testing.dry_run import DryRun, dry_run
from muonmesh.tools.testing.launches import HostSync
from muonmesh.tools.testing.rules import prove_rule
from muonmesh.tools.testing.simulated import Race, RaceError, SimulatedDevice

__all__ = ["DryRun", "HostSync", "Race", "RaceError", "Rates", "SimulatedDevice", "dry_run", "prove_rule"]
