"""Shared parts of the text data sets: reading files, tokenizing, and making rows of tokens."""
