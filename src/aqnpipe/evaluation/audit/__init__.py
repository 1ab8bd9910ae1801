"""Facts about an evaluation, taken while the model computes, and compared with the study.

Prompts are read again from the files of the study by `expectation`, keys are derived by `facts`, decoding is judged by
`aqnpipe.reference.decoder`, and some rows are computed again by `recording`.
"""
