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


@classmethod
def for_target(cls, target: str, revision: str | None = None, **kwargs) -> OspreyDrafterForCausalLM:
    """The published drafter with the longest mean acceptance length, by its card, for the model `target` (ORG/NAME).

    Looked for on the Hub and, without it, in its local cache; loaded by the installed code, so that no code of the
    repo runs. `revision` is a branch, tag or commit of the drafter's repo; other arguments go to `from_pretrained`.

    Raises:
        ValueError, OSError: there is none, or the Hub refuses it; one sentence.
    """
    from osprey.hub_cards.pull import load_for_target  # the package's: the remote code has no such method

    return load_for_target(cls, target, revision, **kwargs)


OspreyDrafter.for_target = for_target

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
