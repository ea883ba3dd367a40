"""One client for everything that is remote or paid: judges and served reward models."""
