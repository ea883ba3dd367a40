"""Models over several ranks (FSDP2, tensor parallelism), or with weights in host memory."""
