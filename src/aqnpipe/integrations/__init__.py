"""Plugins for other programs."""
