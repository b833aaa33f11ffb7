"""Jobs on hosts of a list (over ssh) or of a scheduler: Slurm, Kubernetes, Ray."""
