"""The built-in tiny models, loading of models by path or hub id, and their structure."""
