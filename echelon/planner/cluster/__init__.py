"""Descriptions of clusters: parsed from text and files, taken from a device catalog, or detected on this machine."""
