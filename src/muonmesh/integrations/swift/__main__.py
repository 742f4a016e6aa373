"""Print where the plugin lies, for ``--external_plugins``."""

from pathlib import Path

# ms-swift puts the plugin's folder before all others on `sys.path`, so the file is in a folder without any other name
# that somebody might import.
print(Path(__file__).with_name("muonmesh_plugin.py"))
