"""What the site adds to the reference: the settings of `Muon` in its signature, as the package shows them to Python.

The site reads the sources without importing them, so it reads types and defaults off their declaration.
"""

from __future__ import annotations

from typing import Any

import griffe


class ShowSettings(griffe.Extension):
    """Puts what is declared as ``name: Annotated[type, kind(default, ...)]`` in the place of ``**settings``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the signature of `Muon`."""
        taken = pkg["optimizer.Muon.__init__"].parameters
        del taken["settings"]
        for declared in ("GroupSettings", "OptimizerSettings"):
            for name, attribute in pkg["settings"][declared].attributes.items():
                kind, setting = attribute.annotation.slice.elements
                default = str(setting.arguments[0])
                taken.add(
                    griffe.Parameter(name, annotation=kind, kind=griffe.ParameterKind.keyword_only, default=default)
                )
