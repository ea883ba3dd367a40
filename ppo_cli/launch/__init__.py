"""Several machines as one run: the same line is started on each, and they find each other."""
