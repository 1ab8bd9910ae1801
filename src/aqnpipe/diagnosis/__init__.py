"""Diagnosis: find faulty and sensitive layers of a model on a machine, and derive layer sigmas."""
