"""Running stages on machines: jobs, locks, device leases, Slurm, Ray. Nothing here affects the bytes of a result."""
