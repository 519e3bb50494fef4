"""Long prompts: prompts of a suite behind as many notes as fill a context."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from osprey.eval.prompts import encode
from osprey.eval.suites import Item

FRAME = "Here are some notes.\n\n{notes}\n\nThe notes end here. Now for the task:\n\n{task}"
CHARACTERS_PER_TOKEN = 8  # more than any language has on average


def lengthen(
    items: list[Item], suite: list[Item], lengths: list[int], tokenizer: PreTrainedTokenizerBase, new_tokens: int
) -> tuple[list[Item], list[str]]:
    """Each item once for each of `lengths`, at most so many tokens long together with `new_tokens` new ones.

    The notes are other prompts of the whole `suite`, each at most once: repeated text would flatter copying. Of
    several turns only the first is asked.

    Returns:
        The long items, and the ids of those whose own prompt does not fit.

    Raises:
        ValueError: the suite has too little text for such a context, or no prompt fits into any.
    """
    places = {(item.file, item.prompt.id): place for place, item in enumerate(suite)}
    long, misfits = [], []
    for length in lengths:
        for item in items:
            place = places[item.file, item.prompt.id]
            others = [other.prompt.turns[0] for other in suite[place + 1 :] + suite[:place]]
            text = fill(item.prompt.turns[0], others, length - new_tokens, tokenizer)
            name = f"{item.prompt.id}@{length}"
            if text is None:
                misfits.append(name)
            else:
                long.append(Item(replace(item.prompt, id=name, turns=(text,)), item.file, length))
    if not long:
        raise ValueError(
            f"no prompt of the suite fits into {max(lengths)} tokens together with {new_tokens} new ones; choose "
            "longer --context_lengths."
        )
    return long, misfits


def fill(task: str, others: list[str], length: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A text whose conversation takes at most `length` tokens, and few less; None where the task alone takes more."""
    room = length - count(tokenizer, FRAME.format(notes="", task=task))
    if room < 0:
        return None
    notes = "\n\n".join(others)[: room * CHARACTERS_PER_TOKEN]
    ids = tokenizer(notes, add_special_tokens=False)["input_ids"]
    if len(ids) < room:
        raise ValueError(
            f"the suite has too little text to fill such a context: {len(ids)} tokens beside a prompt, where {room} "
            "are due; choose shorter --context_lengths or a larger suite."
        )
    while True:
        text = FRAME.format(notes=tokenizer.decode(ids[:room]), task=task)
        excess = count(tokenizer, text) - length  # a cut can tokenise otherwise than the whole
        if excess <= 0:
            return text
        room -= excess


def count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return encode(tokenizer, [{"role": "user", "content": text}])["input_ids"].shape[1]
