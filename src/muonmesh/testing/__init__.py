"""For tests of your own: whether a rule depends on sharding, and what a step would do on devices that are not here."""

from muonmesh.report.device_rates import DeviceRates as Rates
from muonmesh.testing.dry_run import DryRun, dry_run
from muonmesh.testing.launches import HostSync
from muonmesh.testing.rules import prove_rule
from muonmesh.testing.simulated import Race, RaceError, SimulatedDevice

__all__ = ["DryRun", "HostSync", "Race", "RaceError", "Rates", "SimulatedDevice", "dry_run", "prove_rule"]
