"""The web page: what runs did and do, live. It reads ledgers and writes nothing."""
