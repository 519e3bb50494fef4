"""Drafting in shapes that never change: the same drafts, compiled once."""

import threading

import pytest
import torch
from tiny import DraftLog, assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target
from transformers import CompileConfig

from osprey.modeling import record_acceptance, runner_osprey
from osprey.modeling.runner_osprey import LEAST_CAPACITY, STATIC_ROWS, DynamicRunner, StaticRunner, new_runner


def both(target, drafter, prompt, monkeypatch, rate, log, max_new_tokens=24):
    """Greedy ids of plain and of assisted generation with a drafter that is right at `rate`, and the rounds."""
    plain = target.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
    oracle(monkeypatch, plain, rate)
    log.start(monkeypatch)
    with record_acceptance() as calls:
        assisted = target.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=drafter)
    return plain, assisted, calls[0].rounds


def static(drafter, backend=None):
    """The drafter, set to static shapes; compiled on this CPU too, where a backend is given."""
    drafter.generation_config.cache_implementation = "static"
    if backend is not None:
        drafter.generation_config.compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
        drafter.generation_config.compile_config._compile_all_devices = True
    return drafter


def eager_backend():
    """A backend that runs what it is given as it stands, and the list of graphs that it has been given."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    return backend, graphs


def replaying_backend(graph, example_inputs):
    """As a CUDA graph does it: every call writes its outputs where the first one did."""
    kept = []

    def replay(*inputs):
        outputs = graph(*inputs)
        if not kept:
            kept.extend(output.clone() for output in outputs)
        for place, output in zip(kept, outputs, strict=True):
            place.copy_(output)
        return tuple(kept)

    return replay


@pytest.mark.parametrize(
    ("family", "rate", "shortlist"),
    [("llama", 0.0, None), ("smollm3", 0.6, None), ("gemma3", 0.6, [1, 3, *range(7, 40)]), ("qwen3", 1.0, None)],
)
def test_drafts_follow_the_definition(family, rate, shortlist, monkeypatch):
    target = tiny_target(family)
    drafter = static(tiny_drafter(target, shortlist=shortlist))
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(), monkeypatch, rate, log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


@pytest.mark.parametrize("length", [1, STATIC_ROWS, STATIC_ROWS + 1, 3 * STATIC_ROWS])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_shorter_and_longer_than_the_rows_of_a_read(length, attention, monkeypatch):
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    drafter.set_attn_implementation(attention)
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(length), monkeypatch, 0.5, log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_long_drafts_and_copies(monkeypatch):
    """Reads of more positions than the rows of a static read, and draft steps behind copied tokens."""
    target = tiny_target(max_position_embeddings=512)
    drafter = static(tiny_drafter(target, max_position_embeddings=512))
    drafter.generation_config.num_assistant_tokens = STATIC_ROWS + 8
    drafter.generation_config.lookup_num_tokens = 3
    log = DraftLog()
    plain, assisted, rounds = both(target, drafter, tiny_prompt(6).repeat(1, 8), monkeypatch, 1.0, log, 150)
    assert max(right for _, right in rounds) > STATIC_ROWS
    assert len(log.steps) < sum(drafted for drafted, _ in rounds)  # the others were copied
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_sampling_draws_what_the_growing_cache_draws():
    """Also where each step overwrites what the one before put out: sampling keeps the scores of a whole draft."""
    torch._dynamo.reset()
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 4
    texts, rounds = [], []
    for set_up in (lambda drafter: drafter, static, lambda drafter: static(drafter, replaying_backend)):
        torch.manual_seed(0)
        with record_acceptance() as calls:
            text = target.generate(
                tiny_prompt(), max_new_tokens=60, do_sample=True, top_k=0, assistant_model=set_up(drafter)
            )
        texts.append(text)
        rounds.append(calls[0].rounds)
    assert all(torch.equal(text, texts[0]) for text in texts) and rounds[0] == rounds[1] == rounds[2]


def test_two_graphs_serve_every_round_of_every_call(monkeypatch):
    """`fullgraph`: no break. Texts, prompts and drafts of other lengths compile nothing anew."""
    target = tiny_target()
    backend, graphs = eager_backend()
    drafter = static(tiny_drafter(target), backend)
    for length, new_tokens, drafted in ((11, 40, 5), (30, 60, 3), (2, 25, 7), (STATIC_ROWS, 50, 1)):
        drafter.generation_config.num_assistant_tokens = drafted
        log = DraftLog()
        with monkeypatch.context() as patch:
            plain, assisted, _ = both(target, drafter, tiny_prompt(length), patch, 0.6, log, new_tokens)
        assert_same_text(target, plain, assisted)
        log.assert_follows_definition(target, drafter)
        assert len(graphs) == 2  # a read and a draft step
        assert isinstance(new_runner(drafter, 1), StaticRunner)  # the call is over, and its buffers are free


def test_each_size_of_buffers_has_static_graphs_of_its_own(monkeypatch):
    """And a text that ends with the buffers: padded rows have room behind it."""
    monkeypatch.setattr(runner_osprey, "LEAST_CAPACITY", 1)
    target = tiny_target()
    backend, graphs = eager_backend()
    drafter = static(tiny_drafter(target), backend)
    for length, compiled in ((32, 2), (64, 4), (128, 6), (32, 6)):
        log = DraftLog()
        with monkeypatch.context() as patch:
            plain, assisted, _ = both(target, drafter, tiny_prompt(6), patch, 0.9, log, length - 6)
        assert_same_text(target, plain, assisted)
        log.assert_follows_definition(target, drafter)
        assert len(graphs) == compiled
    shapes = [
        node.meta["example_value"].shape for graph in graphs for node in graph.graph.find_nodes(op="placeholder")
    ]
    assert all(isinstance(size, int) for shape in shapes for size in shape)


def test_aot_autograd_takes_the_steps(monkeypatch):
    """The passes that stand before inductor and CUDA graphs: functionalisation of the writes into the buffers."""
    torch._dynamo.reset()
    target = tiny_target()
    drafter = static(tiny_drafter(target), "aot_eager")
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(), monkeypatch, 0.6, log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_nothing_is_compiled_on_a_cpu_unless_asked(monkeypatch):
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    drafter.generation_config.compile_config = CompileConfig(backend="a backend that does not exist")
    target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)
    backend, graphs = eager_backend()
    static(drafter, backend).generation_config.disable_compile = True
    target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)
    assert graphs == []


def test_buffers_stay_by_size():
    drafter = static(tiny_drafter(tiny_target()))
    small = new_runner(drafter, 100).cache
    large = new_runner(drafter, LEAST_CAPACITY + 1).cache
    assert small.layers[0].max_cache_len == LEAST_CAPACITY + STATIC_ROWS
    assert large.layers[0].max_cache_len == 2 * LEAST_CAPACITY + STATIC_ROWS
    assert (
        new_runner(drafter, LEAST_CAPACITY).cache is small and new_runner(drafter, 2 * LEAST_CAPACITY).cache is large
    )
    other = new_runner(drafter.to(torch.bfloat16), 7)
    assert other.cache.layers[0].keys.dtype == torch.bfloat16


def test_a_call_inside_a_call_has_a_cache_of_its_own():
    drafter = static(tiny_drafter(tiny_target()))
    outer = new_runner(drafter, 10)
    assert isinstance(outer, StaticRunner) and isinstance(new_runner(drafter, 10), DynamicRunner)
    outer.release()
    forgotten = new_runner(drafter, 10)
    assert isinstance(forgotten, StaticRunner)
    del forgotten
    assert isinstance(new_runner(drafter, 10), StaticRunner)


def test_a_call_under_autocast_drafts_too():
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    with torch.autocast("cpu", torch.bfloat16):
        plain = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False)
        assisted = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, assisted, tolerance=0.5)


def test_a_call_that_overflowed_leaves_nothing_behind(monkeypatch):
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "project_taps", lambda taps: drafter.fc(taps) * torch.nan)
        target.generate(tiny_prompt(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    log = DraftLog().start(monkeypatch)
    target.generate(tiny_prompt(4), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    log.assert_follows_definition(target, drafter)


def test_other_options_compile_anew():
    target = tiny_target()
    backend, graphs = eager_backend()
    drafter = static(tiny_drafter(target), backend)
    target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)
    other = []
    drafter.generation_config.compile_config.backend = lambda graph, inputs: (other.append(graph), graph)[1]
    target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)
    assert len(graphs) == len(other) == 2


def test_threads_do_not_share_buffers():
    drafter = static(tiny_drafter(tiny_target()))
    runners: list[StaticRunner] = [new_runner(drafter, 10)]
    thread = threading.Thread(target=lambda: runners.append(new_runner(drafter, 10)))
    thread.start()
    thread.join()
    assert runners[0].cache is not runners[1].cache


def test_buffers_made_in_inference_mode_serve_outside_of_it():
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    with torch.inference_mode():
        inside = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    outside = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert torch.equal(inside, outside)


def test_attention_without_a_mask_is_refused():
    target = tiny_target()
    drafter = static(tiny_drafter(target))
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation is 'flash_attention_2': load it with 'sdpa'"):
        target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)


def test_other_caches_are_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.cache_implementation = "quantized"
    with pytest.raises(ValueError, match="cache_implementation 'quantized'.*'static'"):
        target.generate(tiny_prompt(), max_new_tokens=10, do_sample=False, assistant_model=drafter)
