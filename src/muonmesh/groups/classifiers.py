"""Classifiers: functions that give `split_params` the roles of parameters in a framework's own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from muonmesh.errors import explain_error
from muonmesh.groups.parameter_sites import Kind, MuonOrAdamW, Role, Site, class_of
from muonmesh.layout.matrix import as_tuples

Classifier = Callable[[Site], Role | None]
"""A function from a `Site` (module, key, shape, name, modules around it) to the parameter's `Role`; None: unknown."""

_registered: list[Classifier] = []


def register(classifier: Classifier) -> Classifier:
    """Register a function that gives `split_params` the roles of parameters in a framework's own classes.

    `split_params` calls classifiers after it has looked for ``muonmesh_matrices`` of a module, and before its own
    rules; overrides take precedence. The classifier registered last is called first, and the first role counts. A
    classifier should use classes and attributes of modules, not names, and return None if it is not sure, because a
    wrong split is a wrong update without an error. This function also works as a decorator::

        @muonmesh.groups.register
        def fused_attention(site):
            if isinstance(site.module, FusedAttention) and site.key == "qkv":
                size = site.module.hidden_size
                return Role("muon", "matrices", "attention: q, k, v", ("rows", size, size, size))

    Args:
        classifier: A function that takes a `Site` and returns a `Role` or None.

    Returns:
        The same function.

    Raises:
        TypeError: ``classifier`` is not callable.
    """
    candidate: object = classifier
    if not callable(candidate):
        needed = "a function of a Site that returns a Role or None"
        raise TypeError(explain_error("register", f"{candidate!r}", needed, "Pass the function itself"))
    if classifier not in _registered:
        _registered.insert(0, classifier)
    return classifier


def unregister(classifier: Classifier) -> None:
    """Remove a classifier.

    Raises:
        ValueError: the classifier is not registered.
    """
    if classifier not in _registered:
        needed = "one that register() was given"
        raise ValueError(explain_error("unregister", f"{classifier!r}", needed, "Pass the same function"))
    _registered.remove(classifier)


def classified(site: Site) -> Role | None:
    """Return the first role that a registered classifier returns for a site; None if all return None.

    Raises:
        TypeError, ValueError: a classifier returns something other than a valid `Role` or None.
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
    is_role = role.algorithm in get_args(MuonOrAdamW) and role.kind in get_args(Kind) and isinstance(role.reason, str)
    if not is_role or (role.algorithm == "muon" and (role.kind != "matrices" or role.matrices is None)):
        needed = 'Role("muon", "matrices", reason, matrices) or Role("adamw", kind, reason, matrices or None) with a '
        needed += f"kind of {', '.join(map(repr, get_args(Kind)))}"
        raise ValueError(explain_error(site.name, f"{role} {by}", needed, write))
    return Role(role.algorithm, role.kind, role.reason, as_tuples(role.matrices))
