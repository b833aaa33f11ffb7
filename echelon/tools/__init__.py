"""Implementation of the commands other than training: doctor, verify, memory, plan, report, bench."""
