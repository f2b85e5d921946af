"""The database's tables (schema.sql), and the rules of double-entry bookkeeping as constraints and triggers.

Every amount moves from one account to another, so all accounts always add up to zero:
generated = trained + dropped (by reason) + buffered + in flight, in tokens and in trajectories.

`headrace audit` compares the text of every statement with that in the file. So another text of a
statement, even in a comment inside it, needs another SCHEMA_VERSION.
"""

from pathlib import Path

SCHEMA_VERSION = "3"
SOURCE = "generated"
DROPPED = "dropped:"
SCHEMA = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
