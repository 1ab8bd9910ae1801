"""Models: the built-in tiny models, their recipe, and loading by path or hub id."""
