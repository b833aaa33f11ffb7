"""Jobs on hosts that something else hands out: a list of hosts and ssh, Slurm, Kubernetes."""
