"""Print the path of the plugin, for ``--external_plugins``."""

from pathlib import Path

# ms-swift puts the plugin's folder in front of `sys.path`. So this folder has no file with a name that other code may
# import.
print(Path(__file__).with_name("muonmesh_plugin.py"))
