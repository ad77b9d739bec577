"""The command line: one file a command; render.py and audit_tables.py alone know rich."""

import gc

# Starting up makes tens of thousands of objects that stay. Looking through them again and again for
# garbage takes a tenth of a short command's time.
gc.set_threshold(100_000)
