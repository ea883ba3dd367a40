"""Reward models behind a server: vLLM, OpenRLHF's protocol, and rerankers."""
