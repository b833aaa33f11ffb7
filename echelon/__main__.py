"""``python -m echelon`` is ``echelon``."""

from echelon.cli import main

main()
