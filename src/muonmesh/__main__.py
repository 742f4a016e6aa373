"""``python -m muonmesh``: the same as the script ``muonmesh``."""

from muonmesh.cli import main

main()
