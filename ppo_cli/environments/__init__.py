"""Episodes of several turns: environments and tools in processes of their own."""
