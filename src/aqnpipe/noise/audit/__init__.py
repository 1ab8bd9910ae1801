"""The audit: recomputes sampled numbers of the noise, from keys of its own, and compares them with what was used.

It imports neither the kernels nor the injection, and derives keys and random numbers by its own code, so an error there
is a contradiction here.
"""
