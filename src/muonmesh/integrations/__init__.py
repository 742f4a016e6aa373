"""Integrations: muonmesh inside other training frameworks, one module or folder for each framework."""
