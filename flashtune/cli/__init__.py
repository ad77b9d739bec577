"""The command line: one file a command, and render.py, the only place that knows rich."""
