"""Model folders: which files they have, what their config.json says, what is known of them."""
