"""From one prompt to one finished trajectory."""
