"""Drafters to compare Osprey with. Importing them makes their folders loadable by `AutoModelForCausalLM`."""

from transformers import AutoConfig, AutoModelForCausalLM

from osprey.eval.baselines.eagle3 import Eagle3Config, Eagle3Drafter, make_eagle3

AutoConfig.register(Eagle3Config.model_type, Eagle3Config)
AutoModelForCausalLM.register(Eagle3Config, Eagle3Drafter)

__all__ = ["Eagle3Config", "Eagle3Drafter", "make_eagle3"]
