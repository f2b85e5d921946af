"""A run, read: how it stands, its tables by column, what to show of it, and whether its books are true."""
