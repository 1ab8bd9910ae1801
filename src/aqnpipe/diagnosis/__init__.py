"""Diagnosis: which layer of a machine is faulty or fragile, and the sigmas that follow from it."""
