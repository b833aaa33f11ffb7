"""Commands beside training: doctor, verify, memory, plans, reports, benchmarks."""
