"""Classifiers: what integrations know of their host's own classes, asked before what is known of anybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from muonmesh.errors import explain_error
from muonmesh.groups.sites import Algorithm, Kind, Role, Site, class_of
from muonmesh.layout.matrix import as_tuples

Classifier = Callable[[Site], Role | None]
"""Says of a place (`Site`: module, key, shape, name, the modules around it) what is there; None: it does not know."""

_registered: list[Classifier] = []


def register(classifier: Classifier) -> Classifier:
    """Let a function say what the parameters of a host's own classes are; `split_params` asks it from then on.

    It is asked before any rule of `split_params` but a module's own ``muonmesh_matrices``; overrides still win. Of
    several the one registered last is asked first, and the first that knows counts. It goes by classes and attributes
    of modules, not by names, and says nothing where it is not sure: a wrong split is a silent wrong update. It also
    works as a decorator::

        @muonmesh.groups.register
        def fused_attention(site):
            if isinstance(site.module, FusedAttention) and site.key == "qkv":
                size = site.module.hidden_size
                return Role("muon", "matrices", "attention: q, k, v", ("rows", size, size, size))

    Args:
        classifier: Gets a `Site`, returns a `Role` or None.

    Returns:
        The same function.
    """
    if classifier not in _registered:
        _registered.insert(0, classifier)
    return classifier


def unregister(classifier: Classifier) -> None:
    """Ask a classifier no longer.

    Raises:
        ValueError: it is not registered.
    """
    _registered.remove(classifier)


def classified(site: Site) -> Role | None:
    """Return what the first registered classifier that knows a place says of it; None: none does.

    Raises:
        TypeError, ValueError: it says what no parameter, or not this one, can be.
    """
    for classifier in tuple(_registered):
        role: object = classifier(site)
        if role is not None:
            return _checked(site, role, getattr(classifier, "__qualname__", repr(classifier)))
    return None


def _checked(site: Site, role: object, said_by: str) -> Role:
    by, write = f"from the classifier {said_by} for {class_of(site.module)}", "Correct the classifier"
    if not isinstance(role, Role):
        raise TypeError(explain_error(site.name, f"{role!r} {by}", "a muonmesh.groups.Role or None", write))
    known = role.algorithm in get_args(Algorithm) and role.kind in get_args(Kind) and isinstance(role.reason, str)
    if not known or (role.algorithm == "muon" and (role.kind != "matrices" or role.matrices is None)):
        needed = 'Role("muon", "matrices", reason, matrices) or Role("adamw", kind, reason, matrices or None) with a '
        needed += f"kind of {', '.join(map(repr, get_args(Kind)))}"
        raise ValueError(explain_error(site.name, f"{role} {by}", needed, write))
    return Role(role.algorithm, role.kind, role.reason, as_tuples(role.matrices))
