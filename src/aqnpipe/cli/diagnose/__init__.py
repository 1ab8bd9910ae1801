"""`aqnpipe diagnose`: one device in this process (command), or the devices of a node, one process each (node)."""
