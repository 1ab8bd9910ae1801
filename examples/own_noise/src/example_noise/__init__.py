"""Error models and a schedule for aqnpipe, as a package of its own."""
