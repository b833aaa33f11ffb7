"""The ``echelon plan`` command: search, report, tables and HTML page."""
