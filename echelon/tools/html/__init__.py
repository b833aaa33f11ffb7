"""What every page of ours shares: how it looks, bars, and time laid out from left to right."""
