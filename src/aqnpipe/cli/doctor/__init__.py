"""`aqnpipe doctor`: what this machine has, what fits, and whether a profile can run here."""
