"""Running what was found: a Draft into a Plan, plans in files, auto, trials."""
