"""Stage 3: turn a backbone into an untrained drafter for one target.

Needs the target's config and tokenizer, not its weights. The drafter computes exactly what the backbone computes,
whatever context it is given, because the context half of every widened projection starts at zero.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from osprey.modeling.configuration_osprey import OspreyConfig, default_target_layer_ids
from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.modeling.target_osprey import vocabulary_sha256
from osprey.train.align import VocabularyAlignment, cached_alignment, load_tokenizer, refuse_missing_rows
from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    file_sha256,
    hub_commit,
    provenance,
    public_name,
    reading_weights,
    save_drafter,
    versions,
    write_json,
)
from osprey.train.data import check_file
from osprey.train.examples import end_of_turn
from osprey.train.jsonl import read_rows
from osprey.train.prune import refuse_windows

SUPPORTED_BACKBONES = ("llama", "qwen2", "qwen3", "smollm3")


@dataclass
class ConvertArguments:
    """Arguments of `convert`."""

    backbone: str = field(metadata={"help": "backbone: Hub id or folder of a llama, qwen2, qwen3 or smollm3 model"})
    target: str = field(metadata={"help": "target model: Hub id or folder; only its config and tokenizer are read"})
    out: str = field(metadata={"help": "drafter folder to write"})
    target_name: str | None = field(default=None, metadata={"help": "name of the target in the drafter's config"})
    target_revision: str | None = field(default=None, metadata={"help": "revision of the target on the Hub"})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "three tapped layers, from 0"})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "size of the shortlist (default: all)"})
    frequencies: list[str] = field(
        default_factory=list,
        metadata={"help": ".jsonl or .jsonl.gz files whose `response` (else `text`) tokens choose the shortlist"},
    )
    response_weight: float = field(default=30.0, metadata={"help": "a response token counts this many text tokens"})
    ctx_norm_weight: float | None = field(
        default=None, metadata={"help": "start of every weight of `ctx_norm` (default: those of `input_layernorm`)"}
    )
    random_blocks: bool = field(
        default=False, metadata={"help": "ablation: a backbone whose blocks and final norm are not pretrained"}
    )
    seed: int = field(default=0, metadata={"help": "of random blocks"})
    untie: bool = field(default=False, metadata={"help": "give the drafter its own head instead of a tied one"})
    force: bool = field(default=False, metadata={"help": "go on where fewer than half of the tokens are mapped"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def convert(arguments: ConvertArguments) -> dict[str, Any]:
    """Writes the drafter folder and returns what `training.json` says about this stage.

    Raises:
        ValueError: the family is unknown, the taps are out of range, or the files do not fit together.
        OSError: the folder exists, and may not be replaced.
    """
    weight = arguments.ctx_norm_weight
    if weight is not None and not math.isfinite(weight):
        raise ValueError(f"--ctx_norm_weight is {weight}, but must be finite.")
    inputs = (arguments.backbone, arguments.target, *arguments.frequencies)
    with atomic_folder(arguments.out, arguments.overwrite, inputs) as work:
        target_config = AutoConfig.from_pretrained(
            arguments.target, revision=arguments.target_revision or "main"
        ).get_text_config()
        backbone_config = AutoConfig.from_pretrained(arguments.backbone)
        if backbone_config.model_type not in SUPPORTED_BACKBONES:
            raise ValueError(
                f"The backbone {arguments.backbone} is of family {backbone_config.model_type!r}, but only "
                f"{', '.join(SUPPORTED_BACKBONES)} blocks can be widened: choose a backbone of one of these."
            )
        refuse_windows(backbone_config, list(range(backbone_config.num_hidden_layers)))
        target_tokenizer = load_tokenizer(arguments.target, arguments.target_revision)
        config = drafter_config(backbone_config, target_config, target_tokenizer, arguments)

        refuse_missing_rows(target_tokenizer, config.vocab_size, arguments.target)
        alignment = cached_alignment(load_tokenizer(arguments.backbone), target_tokenizer).first(config.vocab_size)
        if not arguments.force:
            alignment.refuse_if_poor()
        identify_target(config, arguments.target, target_tokenizer)
        shortlist, shortlist_record = None, None
        if arguments.draft_vocab_size is not None:
            counts = count_tokens(target_tokenizer, arguments.frequencies, arguments.response_weight)
            size = arguments.draft_vocab_size
            ends = end_ids(arguments, target_config, target_tokenizer)
            shortlist = choose_shortlist(counts, size, target_tokenizer, alignment.mapped, ends)
            shortlist_record = {
                "size": size,
                "files": [{"file": Path(path).name, "sha256": file_sha256(path)} for path in arguments.frequencies],
                "response_weight": arguments.response_weight,
                "response_coverage": coverage(counts.responses, shortlist),
            }

        with reading_weights(arguments.backbone):
            backbone = AutoModelForCausalLM.from_pretrained(arguments.backbone, dtype=torch.float32)
        if arguments.random_blocks:
            randomise(backbone, arguments.seed)
        drafter = OspreyDrafterForCausalLM(config)
        state = convert_state_dict(backbone, drafter, alignment, shortlist, arguments.ctx_norm_weight)
        drafter.load_state_dict(state)
        if shortlist is not None:
            drafter.set_draft_ids(shortlist)
        drafter.generation_config.update(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)

        record = {
            "stage": "convert",
            "backbone": config.backbone,
            "target": config.target,
            "target_layer_ids": config.target_layer_ids,
            "alignment": alignment.counts(),
            "ctx_norm_weight": arguments.ctx_norm_weight,
            "random_blocks": arguments.random_blocks,
            "shortlist": shortlist_record,
            "versions": versions(),
        }
        save_drafter(drafter, target_tokenizer, work)
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.backbone), record]})
    return record


def randomise(backbone: PreTrainedModel, seed: int) -> None:
    """Gives the blocks and the final norm the weights that its family starts pretraining from."""
    torch.manual_seed(seed)
    fresh = AutoModelForCausalLM.from_config(backbone.config, dtype=torch.float32)
    backbone.base_model.layers.load_state_dict(fresh.base_model.layers.state_dict())
    backbone.base_model.norm.load_state_dict(fresh.base_model.norm.state_dict())


def drafter_config(
    backbone: PreTrainedConfig,
    target: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    arguments: ConvertArguments,
) -> OspreyConfig:
    """The drafter's config: the backbone's blocks in the target's vocabulary."""
    layer_ids = arguments.target_layer_ids or default_target_layer_ids(target.num_hidden_layers)
    last = target.num_hidden_layers - 2  # the last layer's output is only seen behind the final norm
    if len(set(layer_ids)) != 3 or min(layer_ids) < 0 or max(layer_ids) > last:
        raise ValueError(
            f"The taps {layer_ids} do not fit {arguments.target}: three different layers between 0 and {last} are "
            f"needed (it has {target.num_hidden_layers} layers)."
        )
    bias = bool(getattr(backbone, "attention_bias", False)) or backbone.model_type == "qwen2"
    return OspreyConfig(
        vocab_size=target.vocab_size,
        hidden_size=backbone.hidden_size,
        intermediate_size=backbone.intermediate_size,
        num_hidden_layers=backbone.num_hidden_layers,
        num_attention_heads=backbone.num_attention_heads,
        num_key_value_heads=backbone.num_key_value_heads,
        head_dim=getattr(backbone, "head_dim", None),
        hidden_act=backbone.hidden_act,
        max_position_embeddings=backbone.max_position_embeddings,
        initializer_range=backbone.initializer_range,
        rms_norm_eps=backbone.rms_norm_eps,
        rope_parameters=backbone.rope_parameters,
        attention_bias=bias,
        attention_output_bias=bias and backbone.model_type != "qwen2",
        mlp_bias=bool(getattr(backbone, "mlp_bias", False)),
        qk_norm=backbone.model_type == "qwen3",
        no_rope_layers=getattr(backbone, "no_rope_layers", None),
        tie_word_embeddings=bool(backbone.tie_word_embeddings) and not arguments.untie,
        draft_vocab_size=arguments.draft_vocab_size,
        target=arguments.target_name or public_name(arguments.target),
        target_revision=arguments.target_revision,
        target_hidden_size=target.hidden_size,
        target_num_hidden_layers=target.num_hidden_layers,
        target_layer_ids=sorted(layer_ids),
        backbone=public_name(arguments.backbone),
        backbone_model_type=backbone.model_type,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=target.eos_token_id if target.eos_token_id is not None else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def identify_target(config: OspreyConfig, target: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put into `config` by what the target is known again: its commit on the Hub, and its tokenizer."""
    config.target_revision = hub_commit(target, config.target_revision)
    config.target_tokenizer_sha256 = vocabulary_sha256(tokenizer)
    # Rows behind the tokenizer's ids are padding.
    config.target_num_tokens = min(max(tokenizer.get_vocab().values()) + 1, config.vocab_size)


def convert_state_dict(
    backbone: PreTrainedModel,
    drafter: OspreyDrafterForCausalLM,
    alignment: VocabularyAlignment,
    shortlist: Tensor | None,
    ctx_norm_weight: float | None = None,
) -> dict[str, Tensor]:
    """The drafter's weights: the backbone's, with aligned tables and projections widened to `[0 | W]`.

    `ctx_norm` may start from a constant instead of `input_layernorm`: the first one of SmolLM2 has a median weight of
    0.006, which would let hardly anything of the context through.
    """
    source = backbone.state_dict()
    vocab_size = drafter.config.vocab_size
    state = {
        name: tensor for name, tensor in drafter.state_dict().items() if name in ("d2t", "t2d")
    }  # set with the shortlist
    state["embed_tokens.weight"] = alignment.apply(source["model.embed_tokens.weight"], vocab_size)
    state["norm.weight"] = source["model.norm.weight"]
    head = state["embed_tokens.weight"]
    if not backbone.config.tie_word_embeddings:
        head = alignment.apply(source["lm_head.weight"], vocab_size)
    state["lm_head.weight"] = head if shortlist is None else head[shortlist]
    for name, tensor in source.items():
        if not name.startswith("model.layers."):
            continue
        name = name.removeprefix("model.")
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = torch.cat([torch.zeros_like(tensor), tensor], dim=1)  # [out, 2h]: [context | x]
        state[name] = tensor
        if name.endswith(".input_layernorm.weight"):
            ctx_norm = tensor.clone() if ctx_norm_weight is None else torch.full_like(tensor, ctx_norm_weight)
            state[name.replace("input_layernorm", "ctx_norm")] = ctx_norm

    # The deepest tap's block is copied as it is, so that the context starts as that layer's output.
    hidden_size, target_hidden_size = drafter.config.hidden_size, drafter.config.target_hidden_size
    fc = torch.zeros(hidden_size, 3 * target_hidden_size)  # [h, 3H]
    fc[:, 2 * target_hidden_size :] = torch.eye(hidden_size, target_hidden_size)
    state["fc.weight"] = fc
    return state


@dataclass(frozen=True)
class TokenCounts:
    """Weighted counts of target tokens, and the counts in responses by language."""

    total: Counter[int]
    responses: dict[str, Counter[int]]


def count_tokens(tokenizer: PreTrainedTokenizerBase, files: list[str], response_weight: float) -> TokenCounts:
    """Counts target tokens of `response` fields and the assistant's `messages` (weighted), else of `text` fields.

    `response_ids`, the very tokens that the target wrote, go before the text.
    """
    if not files:
        raise ValueError(
            "A draft vocabulary is chosen by token frequency: give response or text files (--frequencies)."
        )
    total: Counter[int] = Counter()
    responses: dict[str, Counter[int]] = {}
    for path in files:
        rows = list(read_rows(check_file(Path(path))))
        texts = [_written(row) for row in rows]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{path} has a row with neither a text `response`, nor a `text`, nor answers in `messages`."
            )
        encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        for row, encoding in zip(rows, encodings, strict=True):
            ids = row.get("response_ids")
            is_response = "response" in row or "messages" in row
            if ids is None:
                end = end_of_turn(tokenizer) if row.get("finish") == "stop" else None
                ids = encoding.ids + ([] if end is None else [end])
            counts = Counter(ids)
            for token_id, count in counts.items():
                total[token_id] += count * (response_weight if is_response else 1.0)
            if is_response:
                responses.setdefault(row.get("language", "?"), Counter()).update(counts)
    return TokenCounts(total, responses)


def _written(row: dict[str, Any]) -> str | None:
    """What the target wrote in a row, or the row's text."""
    if "messages" not in row:
        return row.get("response", row.get("text"))
    turns = [turn["content"] for turn in row["messages"] if turn.get("role") == "assistant"]
    return "\n".join(turns) if turns else None


def end_ids(arguments: ConvertArguments, target: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All ids that end what the target writes."""
    revision = arguments.target_revision or "main"
    try:
        ends = GenerationConfig.from_pretrained(arguments.target, revision=revision).eos_token_id
    except OSError:  # it brings no such file
        ends = None
    found = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    for ids in (ends, target.eos_token_id):
        found |= set(ids) if isinstance(ids, list) else {ids}
    return found - {None}


def choose_shortlist(
    counts: TokenCounts, size: int, tokenizer: PreTrainedTokenizerBase, mapped: Tensor, ends: set[int]
) -> Tensor:
    """The `size` most frequent of the `mapped` target ids, always with the `ends` and then the special ids that occur.

    Ids of equal count are taken from the lowest on, so that byte-pair merges learnt early, which are the more common
    ones, fill what the files leave open. Returns `[size]` rising ids.
    """
    ends = {token_id for token_id in ends if token_id < len(mapped)}  # mapped or not: a draft must be able to end
    special = {token_id for token_id in tokenizer.all_special_ids if counts.total[token_id] > 0}
    order = sorted(
        ends.union(mapped.nonzero()[:, 0].tolist()),
        key=lambda token_id: (token_id not in ends, token_id not in special, -counts.total[token_id], token_id),
    )
    if not max(len(ends), 1) <= size <= len(order):
        raise ValueError(
            f"A draft vocabulary of {size} is impossible: the target has {len(ends)} end tokens, which are always in "
            f"it, and the backbone has rows for {len(order)} target tokens."
        )
    return torch.tensor(sorted(order[:size]))


def coverage(responses: dict[str, Counter[int]], shortlist: Tensor) -> dict[str, float]:
    """Share of the response tokens that can be drafted, by language and in all (key `all`)."""
    kept = set(shortlist.tolist())
    everything: Counter[int] = Counter()
    for counts in responses.values():
        everything.update(counts)
    return {
        language: round(sum(n for token_id, n in counts.items() if token_id in kept) / counts.total(), 4)
        for language, counts in sorted(responses.items(), key=lambda item: -item[1].total()) + [("all", everything)]
        if counts
    }
