"""Typed, immutable configuration, importable without torch. Nothing is re-exported here: import the modules."""
