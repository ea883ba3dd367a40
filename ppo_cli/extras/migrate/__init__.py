"""Lines, files and engines of other trainers: verl, TRL and OpenRLHF."""
