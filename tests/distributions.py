"""Small sampled models with known distributions, and chi-square tests against these."""

import torch
from scipy.stats import chi2
from tiny import tiny_drafter, tiny_target
from transformers.generation import GenerationConfig, LogitsProcessorList

from osprey.modeling import record_acceptance

V = 6
PROMPT = torch.tensor([[1, 4, 2]])
DRAWS, TRANSITIONS = 400, 800  # enough for the deliberately broken samplers at the end to fail
SIGNIFICANCE = 1e-4  # seeds are fixed; this is the share of torch versions whose streams would fail by chance
SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "top-k, top-p, temperature": {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
    "repetition penalty": {"repetition_penalty": 1.8},
    "min-p, typical": {"min_p": 0.1, "typical_p": 0.95},
}


def small_target(seed=0):
    shape = {
        "vocab_size": V,
        "hidden_size": 16,
        "head_dim": 4,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
    }
    target = tiny_target("untied", seed, **shape, initializer_range=0.6)
    with torch.no_grad():
        target.lm_head.weight *= 0.5  # no token certain, none impossible
    return target


def small_drafter(target, shortlist=None):
    drafter = tiny_drafter(target, 3, shortlist, num_hidden_layers=1, initializer_range=0.5)
    with torch.no_grad():
        drafter.lm_head.weight *= 0.4  # unsure, so that it proposes what the target may accept
    drafter.generation_config.num_assistant_tokens = 3
    return drafter


def sampling(**options) -> GenerationConfig:
    return GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, "temperature": 1.0} | options)


@torch.no_grad()
def next_probabilities(target, ids, options):
    """Exact distribution of the next token after `ids` (`[1, L]`), by transformers' own processors, `[V]`."""
    processors: LogitsProcessorList = target._get_logits_processor(sampling(**options), ids.shape[1])
    return processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0].double()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of `counts` against exact probabilities; cells that expect under 5 are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a sequence of probability zero was generated"
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    small = int((expected.cumsum(0) < 5).sum()) + 1  # pooled cells, smallest first, until they expect 5 together
    small = max(small, int((expected < 5).sum()))
    counts = torch.cat([counts[:small].sum()[None], counts[small:]])
    expected = torch.cat([expected[:small].sum()[None], expected[small:]])
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(chi2.sf(statistic, len(counts) - 1))


def acceptance_rate(rounds) -> float:
    return sum(right for _, right in rounds) / sum(drafted for drafted, _ in rounds)


# A target without attention is a Markov chain of order one, so the transitions of one long text are independent draws:
# thousands of them from few calls, with long drafts.
def chain_target():
    target = small_target()
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with torch.no_grad():
        target.lm_head.weight *= 0.6  # top-p leaves several states reachable
    return target


def draw_transitions(target, drafter, options, tokens=TRANSITIONS // 2, calls=2, seed=0):
    torch.manual_seed(seed)
    counts = torch.zeros(V, V, dtype=torch.double)
    config = sampling(**options, max_new_tokens=tokens, pad_token_id=0)
    with record_acceptance() as recorded:
        for _ in range(calls):
            ids = target.generate(PROMPT, generation_config=config, assistant_model=drafter)[0, 2:]
            counts.index_put_((ids[:-1], ids[1:]), torch.ones((), dtype=torch.double), accumulate=True)
    return counts, [one for call in recorded for one in call.rounds]


def transitions_p_value(target, counts, options) -> float:
    """One test over all states: the sum of independent chi-square statistics, by their p-values (Fisher)."""
    values = []
    for state in range(V):
        exact = next_probabilities(target, torch.tensor([[state]]), options)
        if (exact * counts[state].sum() >= 5).sum() >= 2:
            values.append(max(p_value(counts[state], exact), 1e-300))
    assert len(values) >= 2  # the text goes through enough states to say something
    return float(chi2.sf(-2 * torch.tensor(values, dtype=torch.double).log().sum().item(), 2 * len(values)))
