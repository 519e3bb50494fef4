"""The built-in target for real: what the GGUF file says must survive its conversion."""

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


def test_config(smollm2):
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == ("llama", 49152, 30)
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert config.tie_word_embeddings
    assert not hasattr(config, "quantization_config")


def test_generation_ends_with_the_turn(smollm2, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == tokenizer.eos_token_id


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3  # system, user, assistant
    assert tokenizer.decode(ids) == text
