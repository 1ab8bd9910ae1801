"""`aqnpipe capture` and `aqnpipe parity`."""
