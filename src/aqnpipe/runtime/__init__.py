"""Runs stages on machines: jobs, locks, device leases, Slurm, Ray. Never decides a byte of a result."""
