"""The built-in tiny models and their recipe, loading of models by path or hub id, and their structure."""
