"""Facts about an evaluation, taken while the model computes, and compared with the study.

`recording` observes batches, and computes some rows again; `reference.decoder` judges the decoding; `judgement` reads
questions and prompts from the files of the study, and compares.
"""
