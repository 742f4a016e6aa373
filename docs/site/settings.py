"""What the site adds to the reference: the settings of `Muon` in its signature, and the arguments of `split_params`.

The site reads the sources without importing them, so it reads types and defaults off their declaration.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class ShowSettings(griffe.Extension):
    """Puts what is declared as ``name: Annotated[type, kind(default, ...)]`` in the place of ``**settings``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the signature of `Muon`, and put `split_params` in the place of its wrapped self."""
        pkg["build"].set_member("split_params", pkg["groups.split.split_params"])
        taken = pkg["optimizer.Muon.__init__"].parameters
        del taken["settings"]
        declared, first = {}, list[str]()
        counts = ast.literal_eval(str(pkg["settings.FIRST"].value))
        for kind, count in zip(("GroupSettings", "OptimizerSettings"), counts, strict=True):
            attributes = pkg["settings"][kind].attributes
            declared |= attributes
            first += [*attributes][:count]
        for name in dict.fromkeys((*first, *declared)):
            annotation, setting = declared[name].annotation.slice.elements
            kind, default = griffe.ParameterKind.keyword_only, str(setting.arguments[0])
            taken.add(griffe.Parameter(name, annotation=annotation, kind=kind, default=default))
