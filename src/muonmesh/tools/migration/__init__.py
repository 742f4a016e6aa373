"""Migration: translates the settings and the state of other optimizers to muonmesh."""

from muonmesh.tools.migration.packages import PackageName
from muonmesh.tools.migration.setting_names import convert_settings

__all__ = ["PackageName", "convert_settings"]
