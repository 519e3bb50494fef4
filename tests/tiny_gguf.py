"""Writes a tiny model as a GGUF file, by llama.cpp's names and its order of the rotary rows."""

from pathlib import Path

import numpy as np
from bytes_tokenizer import SPECIAL, bytes_tokenizer
from gguf import GGUFWriter
from transformers import PreTrainedModel

MERGED = "ab"  # GGUF files of byte-pair vocabularies hold at least one merge
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """`model` must have one row more in its vocabulary than the bytes tokenizer."""
    config = model.config
    vocabulary = bytes_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.get), MERGED]
    writer = GGUFWriter(str(path), config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, kind = name.rsplit(".", 1)
        array = weight.float().numpy()
        if module.startswith("model.layers."):
            _, _, block, module = module.split(".", 3)
            if config.model_type == "llama" and module.endswith(("q_proj", "k_proj")):
                # llama.cpp rotates neighbouring rows, transformers the two halves of a head.
                heads = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
                array = heads.swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(f"blk.{block}.{NAMES[module]}.{kind}", np.ascontiguousarray(array))
        else:
            writer.add_tensor(f"{NAMES[module]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
