"""``echelon run``: start one process per GPU, keep their logs, say who failed first, leave nothing behind."""
