"""Parameter groups: which parameters Muon updates, which AdamW updates, and why."""

from muonmesh.groups import transformers
from muonmesh.groups.classifiers import Classifier, register, unregister
from muonmesh.groups.example import Example
from muonmesh.groups.heads import HeadPart
from muonmesh.groups.sites import Role, Site
from muonmesh.groups.split import ParamGroups, split_params

__all__ = ["Classifier", "Example", "HeadPart", "ParamGroups", "Role", "Site", "register", "split_params", "unregister"]

register(transformers.classify)
