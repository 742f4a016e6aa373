"""ms-swift: write ``swift sft --external_plugins $(python -m muonmesh.integrations.swift) --optimizer muonmesh``."""
