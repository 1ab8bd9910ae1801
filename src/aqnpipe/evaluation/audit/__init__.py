"""Facts about an evaluation, taken while the model computes, and compared with the study.

Nothing here shares code with what it checks: prompts are formatted and tokenised by `expectation`, keys derived by
`facts`, tokens chosen by `observation`, and responses computed again by `decoding_again`.
"""
