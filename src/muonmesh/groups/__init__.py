"""Parameter groups: which parameters Muon updates, which AdamW updates, and why."""

from muonmesh.groups.classifiers import Classifier, register, unregister
from muonmesh.groups.example import Example
from muonmesh.groups.param_groups import ParamGroups
from muonmesh.groups.parameter_sites import Role, Site
from muonmesh.groups.split import split_params

__all__ = ["Classifier", "Example", "ParamGroups", "Role", "Site", "register", "split_params", "unregister"]
