"""Shared parts of the image data sets: images in memory, images in files, and cached files."""
