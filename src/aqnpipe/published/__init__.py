"""Check published figures: which are possible, and which claims they support."""
