"""``python -m muonmesh``: the same as the script ``muonmesh``."""

from muonmesh.tools.cli import main

if __name__ == "__main__":  # a process that the doctor spawns imports this module
    main()
