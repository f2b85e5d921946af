"""One prompt to one finished trajectory."""
