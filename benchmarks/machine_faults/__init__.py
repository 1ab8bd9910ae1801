"""Faults and healthy arithmetic of emulated devices, put into a model from outside: material of detection.py."""
