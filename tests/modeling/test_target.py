"""Whether a drafter and a target belong together, and which checkpoints this code reads."""

import hashlib
import json
import warnings
from pathlib import Path

import pytest
from bytes_tokenizer import bytes_tokenizer
from tiny import tiny_drafter, tiny_prompt, tiny_target

from osprey.modeling import OspreyConfig, OspreyDrafter, check_target, check_tokenizer, vocabulary_sha256
from osprey.modeling.configuration_osprey import FORMAT_VERSION

ROOT = Path(__file__).resolve().parents[2]
OURS, THEIRS = "a" * 40, "b" * 40


@pytest.fixture
def pair():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.config.target, drafter.config.target_revision = "org/Model", OURS
    return target, drafter


@pytest.mark.parametrize("name", ["org/model-chat", "someone/Model"])
def test_another_model_is_refused_unless_told(pair, name):
    target, drafter = pair
    target.config.name_or_path = name  # as `from_pretrained` leaves it
    with pytest.raises(
        ValueError, match=f"was made for org/Model, but {name} generates: .*config.target = None"
    ) as error:
        target.generate(tiny_prompt(), assistant_model=drafter, max_new_tokens=4)
    assert "\n" not in str(error.value)
    drafter.config.target = None
    target.generate(tiny_prompt(), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", ["org/Model", "org/model", "", "model", "/data/org/model", "./model", "~/model"])
def test_names_that_tell_no_other_model(pair, name):
    target, drafter = pair
    target.config.name_or_path = name
    check_target(drafter, target)
    drafter.config.target, target.config.name_or_path = "some-folder", "org/other"
    check_target(drafter, target)


def test_a_folder_is_no_hub_id(pair, tmp_path, monkeypatch):
    target, drafter = pair
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    target.config.name_or_path = "some/folder"
    check_target(drafter, target)


def test_another_revision_is_warned_of(pair):
    target, drafter = pair
    with pytest.warns(UserWarning, match=f"revision {OURS[:12]} of org/Model, but {THEIRS[:12]} generates") as warned:
        check_target(drafter, target, THEIRS)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recorded, revision in ((OURS, OURS), (OURS, None), (None, THEIRS), ("v1.0", THEIRS)):  # a tag may move
            drafter.config.target_revision = recorded
            check_target(drafter, target, revision)


def test_the_vocabulary_s_hash_is_of_its_tokens_by_id():
    tokenizer = bytes_tokenizer()
    tokens = [[i, tokenizer.convert_ids_to_tokens(i)] for i in range(len(tokenizer))]
    expected = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    assert vocabulary_sha256(tokenizer) == vocabulary_sha256(bytes_tokenizer("a template")) == expected
    more = bytes_tokenizer()
    more.add_tokens(["<tool>"])
    assert vocabulary_sha256(more) != expected


def test_another_tokenizer_is_refused_unless_told():
    tokenizer, other = bytes_tokenizer(), bytes_tokenizer()
    other.add_tokens(["<tool>"])
    target = tiny_target(vocab_size=300)
    drafter = tiny_drafter(target, target_tokenizer_sha256=vocabulary_sha256(tokenizer))
    drafter.config.target = "org/Model"
    kwargs = {"assistant_model": drafter, "max_new_tokens": 4, "stop_strings": ["never"]}
    target.generate(tiny_prompt(), tokenizer=tokenizer, **kwargs)
    with pytest.raises(ValueError, match="for the tokenizer of org/Model, but one with another vocabulary") as error:
        target.generate(tiny_prompt(), tokenizer=other, **kwargs)
    assert "\n" not in str(error.value)
    drafter.config.target_tokenizer_sha256 = None  # of a drafter that was made before it was recorded
    check_tokenizer(drafter, other)
    drafter.config.target, drafter.config.target_tokenizer_sha256 = None, vocabulary_sha256(tokenizer)
    check_tokenizer(drafter, other)


@pytest.mark.parametrize("version", [1, None])
def test_older_checkpoints_are_read(tmp_path, version):
    """The first format had no `target_tokenizer_sha256`, and a config need not say that it is of the first."""
    drafter = tiny_drafter(tiny_target())
    drafter.config.target = "org/Model"
    drafter.save_pretrained(tmp_path / "new")
    path = tmp_path / "new" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("format_version") == FORMAT_VERSION == 2
    del config["target_tokenizer_sha256"]
    path.write_text(json.dumps(config | ({} if version is None else {"format_version": version})))
    old = OspreyDrafter.from_pretrained(tmp_path / "new")
    assert old.config.target_tokenizer_sha256 is None and old.config.target == "org/Model"
    old.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "hub_cards").glob("*/config.json")), ids=lambda path: path.parent.name
)
def test_published_checkpoints_are_read(folder):
    config = OspreyConfig.from_pretrained(folder.parent)
    stored = json.loads(folder.read_text())
    assert stored["format_version"] <= FORMAT_VERSION == config.format_version
    names = ("target", "target_layer_ids", "draft_vocab_size", "hidden_size", "rope_parameters")
    assert [getattr(config, name) for name in names] == [stored[name] for name in names]


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1])
def test_other_formats_are_refused_before_anything_else(version):
    with pytest.raises(
        ValueError, match=f"format_version is {version}, but this code reads versions 1 to 2 of the .*upd"
    ):
        OspreyConfig(format_version=version, target_layer_ids=[3, 2, 1], of_the_future=1)
