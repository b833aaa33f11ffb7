"""Saying why: the ``echelon plan`` command, its tables and its page."""
