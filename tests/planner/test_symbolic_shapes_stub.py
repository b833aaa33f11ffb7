"""Stand-ins for torch's symbolic shapes: profiles without sympy are the same, and nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import torch

from echelon.base import symbolic_shapes_stub

STAND_IN = """
import sys, torch
if "real" in sys.argv:
    import torch.fx.experimental.symbolic_shapes
from echelon.planner import Cluster, gpt, search
for choice in search(gpt(2, 64, 4, 32, 512), Cluster.parse("1x2xA100", bench=False), batch=4).best:
    print(choice.draft, choice.prediction)
print("sympy" in sys.modules, file=sys.stderr)
import torch.distributed.tensor._decompositions as decompositions
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
assert decompositions.GuardOnDataDependentSymNode is GuardOnDataDependentSymNode
"""


def test_stand_in_for_symbolic_shapes_gives_the_same_plans() -> None:
    """A profile without sympy equals one with it, and what was imported meanwhile has the real error afterwards."""
    ran = [
        subprocess.run([sys.executable, "-c", STAND_IN, *args], capture_output=True, text=True, check=False)
        for args in ((), ("real",))
    ]
    assert [each.returncode for each in ran] == [0, 0], [each.stderr for each in ran]
    assert [each.stderr.splitlines()[-1] for each in ran] == ["False", "True"]
    assert ran[0].stdout == ran[1].stdout
    assert ran[0].stdout


def test_stand_in_for_symbolic_shapes_answers_like_the_module() -> None:
    """Every rule of the stand-in equals the real function on plain numbers; other names import the real module."""
    from torch.fx.experimental import symbolic_shapes

    tensor = torch.empty(2, 3)
    numbers, logic = [(3,), (False,)], [(True,), (True, False), (False, False, True)]
    values = [(tensor,), ([tensor, 1],)]
    given: dict[str, list[tuple[Any, ...]]] = {
        "guard_int": [(3,)],
        "guarding_hint_or_throw": numbers,
        "has_guarding_hint": numbers,
        "is_nested_int": numbers,
        "sym_eq": [(2, 2), (2, 3), ((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1,), (1, 2))],
        "sym_and": logic,
        "sym_or": logic,
        "free_unbacked_symbols": values,
        "has_free_unbacked_symbols": values,
        "_iterate_exprs": values,
        "_iterate_nodes": values,
        "compute_unbacked_bindings": [(None, tensor)],
    }
    for name, rule in symbolic_shapes_stub._RULES.items():
        for args in given.get(name, [(True,), (False,)]):
            with warnings.catch_warnings(action="ignore"):  # one of them is deprecated
                real, own = getattr(symbolic_shapes, name)(*args), rule(*args)
            assert (list(real), list(own)) == ([], []) if own == () else real == own, (name, args)
