"""Stage 1: which blocks are kept, that everything else stays, and what is refused."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from osprey.cli.main import main
from osprey.train.prune import PruneArguments, choose_layers, prune

FAMILIES = ["llama", "untied", "qwen2", "qwen3", "smollm3"]


def save_source(folder, family="llama", **changes):
    model = tiny_target(family, **changes)
    model.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_rows_are_the_sources_and_compute_the_same(tmp_path, family):
    source = save_source(tmp_path / "source", family)
    prune(PruneArguments(source=str(tmp_path / "source"), out=str(tmp_path / "out"), keep="1,4"))
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert pruned.config.model_type == source.config.model_type
    assert pruned.config.num_hidden_layers == 2
    assert pruned.config.tie_word_embeddings == source.config.tie_word_embeddings
    rows = source.state_dict()
    for name, weight in pruned.state_dict().items():
        name = name.replace("layers.1.", "layers.4.").replace("layers.0.", "layers.1.")
        assert torch.equal(weight, rows[name])

    source.model.layers = torch.nn.ModuleList([source.model.layers[1], source.model.layers[4]])
    source.config.num_hidden_layers = 2
    ids = torch.randint(3, 48, (2, 9))
    with torch.no_grad():
        assert torch.equal(
            pruned(input_ids=ids, use_cache=False).logits, source(input_ids=ids, use_cache=False).logits
        )
        # Blocks know their new numbers: with a cache they would otherwise write beside it.
        plain = ids
        for _ in range(4):
            plain = torch.cat([plain, pruned(input_ids=plain, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(pruned.generate(ids, max_new_tokens=4, do_sample=False), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_to_all_its_layers_is_the_source(tmp_path, family):
    source = save_source(tmp_path / "source", family)
    prune(PruneArguments(source=str(tmp_path / "source"), out=str(tmp_path / "out"), layers=5))
    ids = torch.randint(3, 48, (2, 9))
    with torch.no_grad():
        expected = source(input_ids=ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits, expected)


def test_blocks_without_rotary_positions_stay_so(tmp_path):
    save_source(tmp_path / "source", "smollm3")  # blocks 1 and 4 have none
    prune(PruneArguments(source=str(tmp_path / "source"), out=str(tmp_path / "out"), keep="0,1,3"))
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert pruned.config.no_rope_layers == [1, 0, 1]
    ids = torch.randint(3, 48, (1, 6))
    # A single block without positions does not see the order of earlier tokens; one with positions does.
    turned = torch.cat([ids[:, :5].flip(1), ids[:, 5:]], dim=1)
    blocks = list(pruned.model.layers)
    pruned.config.num_hidden_layers = 1
    differences = []
    for block in blocks:
        pruned.model.layers = torch.nn.ModuleList([block])
        with torch.no_grad():
            forward, backward = (pruned(part, use_cache=False).logits[0, -1] for part in (ids, turned))
        differences.append((forward - backward).abs().max().item())
    assert differences[1] < 1e-5
    assert min(differences[0], differences[2]) > 1e-3


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 8), ("qwen2", 8), ("qwen3", 128)])
def test_gguf_source(tmp_path, family, head_dim):
    model = tiny_target(family, vocab_size=VOCABULARY + 1, head_dim=head_dim)
    write_gguf(tmp_path / "model.gguf", model)
    prune(PruneArguments(source=str(tmp_path / "model.gguf"), out=str(tmp_path / "out"), layers=5))
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert pruned.config.model_type == family
    weights = model.state_dict()
    for name, weight in pruned.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [VOCABULARY]


def test_first_layers_dtype_tokenizer_and_record(tmp_path, capsys):
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(tmp_path / "source").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    assert main(["prune", str(tmp_path / "source"), "--layers", "2", "--out", str(tmp_path / "a"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["layer_ids"] == [0, 1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "a")("ab")["input_ids"] == bytes_tokenizer()("ab")["input_ids"]
    training = json.loads((tmp_path / "a" / "training.json").read_text())
    assert [stage["stage"] for stage in training["stages"]] == ["prune"]
    assert str(tmp_path) not in json.dumps(training)
    # A second cut keeps the record of the first.
    prune(PruneArguments(source=str(tmp_path / "a"), out=str(tmp_path / "b"), layers=1))
    assert len(json.loads((tmp_path / "b" / "training.json").read_text())["stages"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 6}, "--layers 6 is out of range: the source has 5 layers."),
        ({"layers": 0}, "--layers 0 is out of range: the source has 5 layers."),
        ({"keep": "0,5"}, "--keep 0,5 is out of range: the source's layers are 0 to 4."),
        ({"keep": "-1"}, "--keep -1 is out of range: the source's layers are 0 to 4."),
        ({"keep": "2,1"}, "--keep 2,1 must name each layer once, in ascending order."),
        ({"keep": "1,1"}, "--keep 1,1 must name each layer once, in ascending order."),
        ({"keep": "a"}, "--keep takes layer numbers separated by commas, such as 0,29, not 'a'."),
        ({}, "give either --layers N or --keep with a list of layers."),
        ({"layers": 1, "keep": "0"}, "give either --layers N or --keep with a list of layers."),
        (
            {"layers": 1, "strategy": "best"},
            "the strategy 'best' is unknown: choose one of first, uniform, ends, influence, angular.",
        ),
    ],
)
def test_refuses_layers(options, message):
    with pytest.raises(ValueError) as refusal:
        choose_layers(5, options.get("layers"), options.get("strategy", "first"), options.get("keep"))
    assert str(refusal.value) == message


def test_refusals_leave_nothing_behind(tmp_path, capsys):
    save_source(tmp_path / "gemma", "gemma3")
    save_source(tmp_path / "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    before = sorted(path.name for path in tmp_path.iterdir())
    cases = {
        (
            tmp_path / "gemma",
            "out",
        ): "is a 'gemma3_text' model; blocks can be pruned from llama, qwen2, qwen3, smollm3.",
        (tmp_path / "empty", "out"): "is a folder without config.json, so it holds no model.",
        (tmp_path / "nowhere", "out"): "there is no model folder",
        (tmp_path / "no.gguf", "out"): "there is no GGUF file",
        (tmp_path / "broken.gguf", "out"): "cannot be read as a GGUF file",
        (tmp_path / "llama", "taken"): "exists already: choose another --out, or give --overwrite to replace it.",
    }
    for (source, out), message in cases.items():
        assert main(["prune", str(source), "--layers", "2", "--out", str(tmp_path / out)]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error
        assert error.startswith("osprey prune: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_failure_while_writing_leaves_nothing_and_keeps_the_old_folder(tmp_path, monkeypatch):
    save_source(tmp_path / "source")
    arguments = PruneArguments(source=str(tmp_path / "source"), out=str(tmp_path / "out"), layers=1)
    prune(arguments)
    old = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("osprey.train.prune.write_json", full)
    arguments.layers, arguments.overwrite = 2, True
    with pytest.raises(OSError, match="No space left"):
        prune(arguments)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    monkeypatch.undo()
    prune(arguments)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
