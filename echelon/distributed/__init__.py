"""The ranks of a job: joining them, process groups, collectives, and which part of a tensor a rank holds."""
