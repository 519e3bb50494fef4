"""A drafter without its taps as one GGUF file, by llama.cpp's names; the vocabulary is the target's."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quantize
from torch import Tensor
from transformers import AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.serving.causal_lm import causal_lm_config, causal_lm_state, check_causal_lm

GGUF_NAME = "model.gguf"
ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
STORED = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def write_gguf(
    drafter: OspreyDrafter, drafter_path: str, path: Path, dtype: torch.dtype, tokenizer_pre: str = "default"
) -> None:
    """Matrices are stored as `dtype`, vectors as float32, as llama.cpp wants them.

    Raises:
        ValueError: llama.cpp's architectures, or its byte-level vocabularies, cannot express this drafter.
    """
    config = drafter.config
    causal_lm_config(config)  # refuses what is no ordinary causal LM
    family = config.backbone_model_type
    rope = config.rope_parameters
    obstacles = {
        f"of family {family}": family not in ARCHITECTURES,
        f"with {rope.get('rope_type')} rotary positions": rope.get("rope_type", "default") != "default",
        "with biases": config.attention_output_bias or config.mlp_bias or config.attention_bias != (family == "qwen2"),
        # transformers' reader, which checks the file, takes 128 whatever the file says
        f"with heads of {config.head_dim} instead of 128": family == "qwen3" and config.head_dim != 128,
    }
    found = [name for name, there in obstacles.items() if there]
    if found:
        raise ValueError(
            f"This drafter's blocks are {', '.join(found)}, which cannot be written as GGUF and read back: export it "
            "as causal-lm, and convert that with llama.cpp's own script."
        )
    writer = GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer, AutoTokenizer.from_pretrained(drafter_path), config, tokenizer_pre)
    add_tensors(writer, drafter, STORED[dtype])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def add_vocabulary(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: OspreyConfig, tokenizer_pre: str
) -> None:
    """The target's tokens by id; ids without one, which only pad the vocabulary, get a name that no text has."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"The target's vocabulary is a {model['type']} one, and only byte-level BPE is written to GGUF: export "
            "the drafter as causal-lm, and convert that with llama.cpp's own script."
        )
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = {i: TokenType.CONTROL if token.special else TokenType.USER_DEFINED for i, token in added.items()}
    ids = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer_pre)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types([kinds.get(i, TokenType.NORMAL if i in names else TokenType.UNUSED) for i in ids])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for kind in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{kind}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{kind}_token_id")(token_id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def add_tensors(writer: GGUFWriter, drafter: OspreyDrafter, stored: GGMLQuantizationType) -> None:
    config = drafter.config
    names = get_tensor_name_map(ARCHITECTURES[config.backbone_model_type], config.num_hidden_layers)
    for name, tensor in causal_lm_state(drafter).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.backbone_model_type == "llama" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            tensor = interleave_rotary(tensor, config.head_dim)
        kind = stored if tensor.dim() > 1 else GGMLQuantizationType.F32
        array = np.ascontiguousarray(tensor.detach().float().numpy())
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), quantize(array, kind), raw_dtype=kind
        )


def interleave_rotary(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key projection in llama.cpp's order for llama.

    It turns neighbouring rows of a head together, transformers those half a head apart.
    """
    return tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(tensor.shape)


def check_gguf(drafter: OspreyDrafter, drafter_path: str, folder: Path) -> float:
    """Loads the file back through transformers' GGUF reader: largest difference from the drafter's own logits.

    Raises:
        ValueError: the difference is more than float noise, or a token of the target's has another id.
    """
    found = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME).get_vocab()
    wrong = [t for t, i in AutoTokenizer.from_pretrained(drafter_path).get_vocab().items() if found.get(t) != i]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of the target's tokens have another id in the GGUF file, {wrong[0]!r} among them: it is "
            "not kept; report this as a bug."
        )
    return check_causal_lm(drafter, folder, gguf_file=GGUF_NAME, quantization_config=GgufConfig(dequantize=True))
