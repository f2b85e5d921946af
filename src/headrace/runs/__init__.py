"""A run, read: how it stands, its tables by column, what to show of it, and its audit."""
