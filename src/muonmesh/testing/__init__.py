"""For your own tests: checks that a rule does not depend on sharding, and runs steps on simulated devices."""

from muonmesh.report.device_rates import DeviceRates as Rates
from muonmesh.testing.dry_run import DryRun, dry_run
from muonmesh.testing.launches import HostSync
from muonmesh.testing.rules import prove_rule
from muonmesh.testing.simulated import Race, RaceError, SimulatedDevice

__all__ = ["DryRun", "HostSync", "Race", "RaceError", "Rates", "SimulatedDevice", "dry_run", "prove_rule"]
