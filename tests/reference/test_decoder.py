"""The plain decoder follows rows, prefixes and draws, and names what is wrong with responses."""

from types import SimpleNamespace

import pytest
import torch

from aqnpipe.reference.decoder import Choice, DecodingTrace, _without_gaps

VOCABULARY, END, PAD = 16, 1, 0
PROMPTS = [[5, 6, 7], [4], [8, 9]]
RESPONSES = [[3, 4, END], [6, END], [7, 7, 7]]


def cache(length):
    return SimpleNamespace(get_seq_length=lambda: length)


def logits_for(tokens):
    """Logits [rows, vocabulary] whose most probable tokens are these."""
    found = torch.linspace(-1, 0, VOCABULARY).repeat(len(tokens), 1)
    found[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return found


def recorded(responses=RESPONSES, chosen=logits_for):
    """The trace of a decoder that reads the prompts, shortest first, and gives these responses."""
    trace = DecodingTrace(PROMPTS, PAD, Choice())
    rows = sorted(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
    width = max(map(len, PROMPTS))
    ids = torch.tensor([PROMPTS[row] + [PAD] * (width - len(PROMPTS[row])) for row in rows])
    ends, places = torch.tensor([len(PROMPTS[row]) - 1 for row in rows]).unique(return_inverse=True)
    logits = torch.zeros(len(rows), len(ends), VOCABULARY)
    logits[torch.arange(len(rows)), places] = chosen([responses[row][0] for row in rows])
    trace.note({"input_ids": ids, "past_key_values": cache(width), "logits_to_keep": ends}, logits)
    for step in range(1, max(map(len, responses))):
        rows = _without_gaps(rows, [len(responses[row]) > step for row in rows])
        ids = torch.tensor([[responses[row][step - 1]] for row in rows])
        chosen_logits = chosen([responses[row][step] for row in rows])[:, None]
        trace.note({"input_ids": ids, "past_key_values": cache(width + step)}, chosen_logits)
    return trace


def test_right_responses_have_no_findings():
    trace = recorded()
    verdict = trace.judge(RESPONSES)
    assert verdict.findings == ()
    assert trace.prompts_read == PROMPTS
    assert verdict.compared == 8
    assert verdict.top_logits == ((5.0,) * 3, (5.0,) * 2, (5.0,) * 3)
    # Row 1, the shortest prompt, is at the first place; it ends after two tokens and the last row, 0, takes its place.
    assert verdict.moved == {0: 3}


@pytest.mark.parametrize(
    ("responses", "row", "problem"),
    [
        ([[3, 4, END], [6, END], [7, 2, 7]], 2, "token 2 is 2, the model read 7"),
        (
            [[3, 4], [6, END], [7, 7]],
            1,
            "it was cut early, or one of 2 others that end here: the model read token 2 of 2",
        ),
        ([[3, 4, END], [6], [7, 7, 7]], 1, "it was cut early: the model read token 1 of 3 rows"),
        ([[3, 4, END], [6, END, 9], [7, 7, 7]], 1, "it goes on behind token 2, which the model read of 2 rows"),
        ([[3, 4, END], [6, END], [7, 7, 7, 7]], 2, "it goes on behind token 3"),
        ([[3, 4, END], [6, END], [7, 7, 9]], 2, "the last token of the response is 9, the model chose 7"),
        ([[7, 7, 7], [6, END], [3, 4, END]], 2, "token 1 is 3, the model read 7"),
    ],
)
def test_other_responses_are_named(responses, row, problem):
    (found, text), *_ = recorded().judge(responses).findings
    assert found == row
    assert problem in text


def test_a_token_that_is_not_the_most_probable_one_is_named():
    wrong = recorded(chosen=lambda tokens: logits_for([2 if token == 4 else token for token in tokens]))
    assert wrong.judge(RESPONSES).findings == ((0, "token 2 is not the most probable one; the study decodes greedily"),)


def test_other_prompts_are_seen():
    trace = DecodingTrace([[5, 6]], PAD, Choice())
    trace.note({"input_ids": torch.tensor([[5, 7, PAD]]), "past_key_values": cache(3)}, logits_for([END])[:, None])
    assert trace.prompts_read == [[5, 7]]
    assert "read 1 of 1 prompts, 2 have a response" in trace.judge([[END], [END]]).findings[0][1]


def test_a_common_prefix_belongs_to_every_prompt():
    prompts = [[9, 8, 7, 3], [9, 8, 7, 4]]
    trace = DecodingTrace(prompts, PAD, Choice())
    trace.note({"input_ids": torch.tensor([[9, 8, 7]]), "past_key_values": cache(3)}, logits_for([2])[:, None])
    trace.note({"input_ids": torch.tensor([[3], [4]]), "past_key_values": cache(4)}, logits_for([5, END])[:, None])
    trace.note({"input_ids": torch.tensor([[5]]), "past_key_values": cache(5)}, logits_for([END])[:, None])
    assert trace.prompts_read == prompts
    assert trace.judge([[5, END], [END]]).findings == ()


def test_masked_tokens_on_the_left_are_no_part_of_a_prompt():
    trace = DecodingTrace([[5, 6], [7]], PAD, Choice())
    mask = torch.tensor([[1, 1], [0, 1]])
    arguments = {"input_ids": torch.tensor([[5, 6], [PAD, 7]]), "attention_mask": mask, "past_key_values": cache(2)}
    trace.note(arguments, logits_for([END, END])[:, None])
    assert trace.prompts_read == [[5, 6], [7]]
    assert trace.judge([[END], [END]]).findings == ()


def drawn(temperature=0.8, seed=3):
    """Trace and responses of a sampler of one token per row, of a batch whose rows 2 to 4 these are."""
    torch.manual_seed(2)
    logits = 1.5 * torch.randn(3, VOCABULARY)
    draws = torch.empty(6, VOCABULARY).exponential_(generator=torch.Generator().manual_seed(seed))
    tokens = ((logits / temperature).softmax(-1) / draws[2:5]).argmax(-1).tolist()
    trace = DecodingTrace(PROMPTS, PAD, Choice(0.8, 3, first_row=2, num_rows=6))
    places = [1, 2, 0]
    ids = torch.tensor([PROMPTS[row] + [PAD] * (3 - len(PROMPTS[row])) for row in places])
    whole = logits[places][:, None].expand(-1, 3, -1)
    trace.note({"input_ids": ids, "past_key_values": cache(3)}, whole)
    noted = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).tolist()
    return trace, [[token] for token in tokens], noted


def test_draws_are_repeated_by_row_of_the_whole_batch():
    trace, responses, noted = drawn()
    verdict = trace.judge(responses, noted)
    assert verdict.findings == ()
    assert len(verdict.gaps) == 3
    assert max(verdict.gaps) < 0.5
    assert verdict.noted is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"seed": 4}, "another sample: of another seed"),
        ({"temperature": 0.001}, "decoded greedily"),
        ({"temperature": 2.5}, "sampled at temperature"),
    ],
)
def test_other_draws_are_named(changes, cause):
    trace, responses, _ = drawn(**changes)
    found = trace.judge(responses).findings
    assert found
    assert all(cause in text and "the study samples at temperature 0.8" in text for _, text in found)


def test_log_probabilities_of_other_logits_are_named():
    trace, responses, noted = drawn()
    assert "it drew from other (rounded?) logits" in trace.judge(responses, [[one + 0.01] for [one] in noted]).noted
