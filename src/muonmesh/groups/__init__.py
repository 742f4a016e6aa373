"""Parameter groups: who goes to Muon, who to AdamW, and why."""

from muonmesh.groups.split import ParamGroups, split_params

__all__ = ["ParamGroups", "split_params"]
