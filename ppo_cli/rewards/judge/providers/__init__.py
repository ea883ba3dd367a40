"""The four providers behind one `ask`; only here are their SDKs imported."""
