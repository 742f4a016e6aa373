"""Moving here: what the settings of other optimizers mean, and what they keep of a parameter."""

from muonmesh.migration.packages import PackageName
from muonmesh.migration.setting_names import convert_settings

__all__ = ["PackageName", "convert_settings"]
