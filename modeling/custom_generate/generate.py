"""`target.generate(**inputs, custom_generate="org/osprey-…", trust_remote_code=True)`: with this repository's drafter.

Does what `assistant_model=drafter` does, and replaces nothing in transformers: what an Osprey drafter does in another
way stands in a wrapper around the target for the time of one call.
"""

import re
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")


class AssistedTarget:
    """A target for one call of `GenerationMixin.generate`, with an Osprey drafter for its assistant."""

    _beam_search = GenerationMixin._beam_search  # leaves every assistant aside

    def __init__(self, target: PreTrainedModel):
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __call__(self, *args, **kwargs) -> Any:
        return self.target(*args, **kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs) -> None:
        drafter = generation_mode_kwargs["assistant_model"]
        drafter.osprey_check_target(self.target)
        if "tokenizer" in generation_mode_kwargs and hasattr(drafter, "osprey_check_tokenizer"):
            drafter.osprey_check_tokenizer(generation_mode_kwargs["tokenizer"])
        self.target._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _get_candidate_generator(self, generation_config, logits_processor, assistant_model, **kwargs) -> Any:
        return assistant_model.osprey_candidate_generator(
            self.target, generation_config=generation_config, logits_processor=logits_processor
        )

    def _assisted_decoding(self, input_ids: torch.LongTensor, *, assistant_model, **kwargs) -> Any:
        decode = partial(type(self.target)._assisted_decoding, self)
        return assistant_model.osprey_decode(decode, input_ids, **kwargs)


def generate(*inputs, model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **kwargs) -> Any:
    """`model.generate(*inputs, **kwargs)`, drafted for by `assistant_model`, or by this repository's drafter.

    Raises:
        ValueError: the drafter was made for another model, or there is no repository to load it from.
    """
    options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    if assistant_model is None and hasattr(model, "osprey_decode"):
        # Loading a drafter with trust_remote_code makes this function its own `generate`.
        return GenerationMixin.generate(model, *inputs, **kwargs)
    if assistant_model is None:
        repo, commit = own_repo(__name__)
        assistant_model = load_drafter(repo, model.dtype, model.device, **options | {"revision": commit})
    return GenerationMixin.generate(AssistedTarget(model), *inputs, assistant_model=assistant_model, **kwargs)


@lru_cache(maxsize=1)
def load_drafter(repo: str, dtype: torch.dtype, device: torch.device, **options) -> PreTrainedModel:
    """The drafter of `repo`, kept for the next call. Its code comes from the same commit as this, which is trusted."""
    drafter = AutoModelForCausalLM.from_pretrained(repo, dtype=dtype, trust_remote_code=True, **options)
    return drafter.to(device).eval()


def own_repo(module: str) -> tuple[str, str]:
    """Id and commit of the repository that this module came from, which transformers writes into its name."""
    found = re.search(r"\.([^.]+)\.([^.]+)\.([0-9a-f]{40})\.custom_generate\.generate$", module)
    if found is None:
        raise ValueError(
            "A custom_generate that is read from a folder does not know where its drafter is: load the drafter, and "
            "pass it as assistant_model."
        )
    *names, commit = found.groups()
    names = [re.sub(r"^_(?=\d)", "", name).replace("_hyphen_", "-").replace("_dot_", ".") for name in names]
    return "/".join(names), commit
