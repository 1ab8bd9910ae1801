"""`aqnpipe robustness`."""
