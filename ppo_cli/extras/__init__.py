"""Commands next to training (tests of rewards, fitting, verl): imported by cli/ alone."""
