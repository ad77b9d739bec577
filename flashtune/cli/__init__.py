"""The command line: one file a command, and render.py, the only place that knows rich."""

import gc

# Starting up makes tens of thousands of objects that stay. Looking through them again and again for
# garbage takes a tenth of a short command's time.
gc.set_threshold(100_000)
