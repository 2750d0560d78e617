"""Where ranks run, how they meet, and how the driver waits for them."""
