"""``echelon run``: starts one process per GPU, keeps their logs, reports the first failure, leaves no process."""
