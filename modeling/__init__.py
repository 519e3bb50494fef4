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
    "default_target_layer_ids",
    "fp16_linears",
    "int8_linears",
    "record_acceptance",
]
