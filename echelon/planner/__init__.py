"""Choosing a plan: what a model costs, what machines can do, which plan is best, and why."""
