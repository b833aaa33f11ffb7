"""Benchmarks in folders by subject; ``support`` has what several folders use, ``measured`` results of the last runs.

A script is run by its path, ``python benchmarks/FOLDER/NAME.py``, and imports other modules by their full names: the
root of the repository is on the path wherever echelon can be imported from it, installed as editable or by PYTHONPATH.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  #: of the repository
