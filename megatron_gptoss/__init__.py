"""Reinforcement learning of GPT-OSS with Megatron-Core and vLLM."""

__version__ = "0.1.0"
