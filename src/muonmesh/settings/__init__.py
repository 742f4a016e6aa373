"""Settings: the arguments of `Muon` and the keys of its param groups: declared, checked, and read by each step."""

from muonmesh.settings.checks import (
    algorithm_of,
    check_group,
    check_process_group,
    check_structure,
    needed_algorithm,
    read_settings,
)
from muonmesh.settings.declared import (
    FIRST,
    FOREIGN_KEYS,
    FRESH_MEANS,
    GROUP_SETTINGS,
    LOST_GROUP,
    LOST_LAYOUTS,
    NORM_MEANS,
    OPTIMIZER_SETTINGS,
    SETTINGS,
    MuonSettings,
    ProcessGroup,
    shows_settings,
)
from muonmesh.settings.reading import SettingsFound, keep_rates_apart, plan_terms, read_groups

__all__ = [
    "FIRST",
    "FOREIGN_KEYS",
    "FRESH_MEANS",
    "GROUP_SETTINGS",
    "LOST_GROUP",
    "LOST_LAYOUTS",
    "NORM_MEANS",
    "OPTIMIZER_SETTINGS",
    "SETTINGS",
    "MuonSettings",
    "ProcessGroup",
    "SettingsFound",
    "algorithm_of",
    "check_group",
    "check_process_group",
    "check_structure",
    "keep_rates_apart",
    "needed_algorithm",
    "plan_terms",
    "read_groups",
    "read_settings",
    "shows_settings",
]
