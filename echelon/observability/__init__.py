"""What a run reports: metrics, run logs, traces and stall detection."""
