"""Assets of the quickstart: a tiny model and an arithmetic task, made on the spot without a download."""
