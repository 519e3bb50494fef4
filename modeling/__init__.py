"""The Osprey drafter and its place in transformers' assisted generation."""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_osprey import OspreyConfig, default_target_layer_ids
from .cpu_linears import fp16_linears, int8_linears
from .decoding_osprey import Acceptance, record_acceptance
from .generation_osprey import OspreyCandidateGenerator, check_target
from .modeling_osprey import OspreyDrafterForCausalLM, OspreyOutput

AutoConfig.register("osprey", OspreyConfig)
AutoModelForCausalLM.register(OspreyConfig, OspreyDrafterForCausalLM)

OspreyDrafter = OspreyDrafterForCausalLM

__all__ = [
    "Acceptance",
    "OspreyCandidateGenerator",
    "OspreyConfig",
    "OspreyDrafter",
    "OspreyDrafterForCausalLM",
    "OspreyOutput",
    "check_target",
    "default_target_layer_ids",
    "fp16_linears",
    "int8_linears",
    "record_acceptance",
]
