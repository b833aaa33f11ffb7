"""Modules that every package may import: errors, configuration, environment, formatting, network and credentials."""
