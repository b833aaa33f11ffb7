"""The public API: ``distribute()``, ``launch()`` and the names of ``echelon.X``."""
