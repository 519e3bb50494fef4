"""A tiny target with responses, their features and a drafter on disk, and command lines over them."""

import json

from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.train.features import FeatureArguments, prepare_features

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def prepare(line, data, features, **changes):
    settings = {"target": str(line / "target"), "data": [str(line / data)], "features": str(line / features)}
    return prepare_features(FeatureArguments(**settings | {"precision": "fp32"} | changes))


def make_line(tmp_path):
    """A target folder, its responses, their features, and a drafter folder."""
    tokenizer = bytes_tokenizer(TEMPLATE)
    target = tiny_target(vocab_size=BYTES, eos_token_id=2, bos_token_id=1)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    with open(tmp_path / "responses.jsonl", "w") as file:
        for number in range(24):
            row = {
                "id": f"p-{number}",
                "language": "en",
                "prompt": f"say {number}",
                "response": f"well, {number * 7}!",
            }
            file.write(json.dumps(row | {"temperature": 0.0, "finish": "stop"}) + "\n")
    prepare(tmp_path, "responses.jsonl", "features")
    drafter = tiny_drafter(target, tie_word_embeddings=True, shortlist=list(range(0, BYTES, 2)), eos_token_id=2)
    drafter.save_pretrained(tmp_path / "drafter")
    tokenizer.save_pretrained(tmp_path / "drafter")
    return tmp_path


def flags(line, out, checkpoints, **changes):
    settings = {
        "features": line / "features",
        "out": line / out,
        "output_dir": line / checkpoints,
        "held_out_percent": 20,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "unroll_steps": 3,
        "unroll_fraction": 0.5,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 3,
        "precision": "fp32",
        "disable_tqdm": True,
    } | changes
    return [str(line / "drafter"), *(str(part) for name, value in settings.items() for part in (f"--{name}", value))]
