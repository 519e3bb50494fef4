"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`) to learn of Osprey drafters.

With it, an unmodified vLLM serves a target with an Osprey drafter through its EAGLE-3 path:

    vllm serve TARGET --speculative-config '{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 5}'
"""

from importlib.util import find_spec

MODEL = "osprey.serving.vllm_model:OspreyForVllm"  # imported by vLLM when it needs the class, not before


def register() -> None:
    """Make the config and the model class known; once or many times is the same, and nothing happens without vLLM."""
    if find_spec("vllm") is None:
        return
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from osprey.serving.vllm_config import OspreyVllmConfig

    AutoConfig.register("osprey", OspreyVllmConfig, exist_ok=True)
    # vLLM looks the drafter up under its own architecture, then once more with its prefix for EAGLE-3 drafters.
    for architecture in ("OspreyDrafterForCausalLM", "Eagle3OspreyDrafterForCausalLM"):
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, MODEL)
