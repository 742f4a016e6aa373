"""Migration: translates the settings and the state of other optimizers to muonmesh."""

from muonmesh.tools.migration.packages import PackageName, convert_settings

__all__ = ["PackageName", "convert_settings"]
