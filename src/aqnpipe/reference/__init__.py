"""Plain references: what a decoder must do, written a second time, simply, and compared with a recorded trace.

Nothing here is used by what it checks, and nothing here calls what it checks. Evaluation and training share it.
"""
