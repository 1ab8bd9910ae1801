"""Typed, frozen configuration; importable without torch. Import the concrete modules: nothing is re-exported here."""
