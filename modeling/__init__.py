"""The Osprey drafter and its place in transformers' assisted generation.

Once this package is imported, `AutoModelForCausalLM` loads drafters with its classes, whatever code they bring along
and with or without `trust_remote_code`. Where it is only installed, a drafter's own code is run, if it is trusted.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_osprey import OspreyConfig, default_target_layer_ids
from .cpu_linears import fp16_linears, int8_linears
from .decoding_osprey import Acceptance, record_acceptance
from .generation_osprey import OspreyCandidateGenerator
from .modeling_osprey import OspreyDrafterForCausalLM, OspreyOutput
from .target_osprey import check_target, check_tokenizer, vocabulary_sha256

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
    "check_tokenizer",
    "default_target_layer_ids",
    "fp16_linears",
    "int8_linears",
    "record_acceptance",
    "vocabulary_sha256",
]
