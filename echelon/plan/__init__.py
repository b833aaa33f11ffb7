"""The seam: everything that decides writes a Plan, everything that runs reads one."""

from echelon.plan.make import make_plan
from echelon.plan.plan import Bucket, Parameter, Plan

__all__ = ["Bucket", "Parameter", "Plan", "make_plan"]
