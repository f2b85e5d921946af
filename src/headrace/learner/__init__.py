"""Groups in, one optimizer step out: advantages, losses, packing."""
