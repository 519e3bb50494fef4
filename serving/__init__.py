"""Osprey drafters in other engines: the vLLM plugin, exports, and what measures them."""
