"""The command line, one module per command.

The modules import heavy libraries (torch, polars, pandera) inside functions, so that `aqnpipe --help` starts fast.
"""
