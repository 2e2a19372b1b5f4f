"""Packed documents, in each format that transformers' collators produce."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DataCollatorWithFlattening

from support import assert_close

COLLATORS = {
    "positions": {},
    "positions from 2": {"position_ids_start": 2},
    "numbers": {"return_position_ids": False, "return_seq_idx": True},
    "offsets": {"return_flash_attn_kwargs": True},
    "offsets alone": {"return_position_ids": False, "return_flash_attn_kwargs": True},
}


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
@pytest.mark.parametrize("options", COLLATORS.values(), ids=COLLATORS)
@torch.no_grad()
def test_documents_of_a_collator_do_not_see_each_other(make, tokens, mixer, options):
    model, (first, second) = make(mixer=mixer), tokens()
    batch = DataCollatorWithFlattening(**options)([{"input_ids": x.tolist()} for x in (first[:5], second, first[:1])])
    packed = model(**batch, output_hidden_states=True)
    assert packed.past_key_values is None
    alone = model(second[None], output_hidden_states=True)
    assert_close(packed.logits[:, 5:-1], alone.logits, 1e-9, "second document")
    assert_close(packed.hidden_states[1][:, 5:-1], alone.hidden_states[1], 1e-9, "after a block")


@torch.no_grad()
def test_every_row_of_a_batch_has_its_own_documents(make, tokens):
    model, ids = make(), tokens()
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    logits = model(ids, position_ids=positions).logits
    assert logits.shape[:2] == ids.shape
    for row, start, stop in ((0, 0, 5), (0, 5, 12), (1, 0, 9), (1, 9, 12)):
        assert_close(logits[row, start:stop], model(ids[row : row + 1, start:stop]).logits[0], 1e-9, "document")


@torch.no_grad()
def test_padding_may_stand_between_packed_documents(make, tokens):
    model, (ids, _) = make(), tokens()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 0]])
    logits = model(ids[None].masked_fill(mask == 0, 1000), attention_mask=mask, position_ids=positions).logits
    for start, stop in ((2, 6), (8, 11)):
        assert_close(logits[:, start:stop], model(ids[None, start:stop]).logits, 1e-9, "document")
    positions[0, 8:11] += 4
    one = model(ids[None], attention_mask=mask, position_ids=positions).logits
    assert_close(one[:, 8:11], model(ids[None, [2, 3, 4, 5, 8, 9, 10]]).logits[:, 4:], 1e-9, "one document with gaps")


@pytest.mark.parametrize("positions", [torch.arange(12)[None], torch.arange(3, 15).expand(2, -1)])
@torch.no_grad()
def test_positions_of_one_document_change_nothing(make, tokens, positions):
    model, ids = make(), tokens()
    assert torch.equal(model(ids, position_ids=positions).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"position_ids": [0, 1, 2, 0, 1, 2], "use_cache": True}, ValueError, "position_ids or seq_idx has some"),
        ({"position_ids": [0, 1, 2, 5, 6, 7]}, ValueError, "position_ids must increase by 1.*got 5 after 2"),
        ({"position_ids": [0, 1]}, ValueError, r"position_ids must be \(1, 6\)"),
        ({"seq_idx": [[0, 0], [1, 1]]}, ValueError, r"seq_idx must be \(1, 6\)"),
        (
            {"position_ids": [0, 1, 2, 3, 0, 1], "attention_mask": [1, 1, 0, 1, 1, 1]},
            ValueError,
            "attention_mask must not have padding inside of packed documents",
        ),
    ],
)
def test_what_positions_cannot_say_is_refused(make, tokens, arguments, error, message):
    given = {name: x if isinstance(x, bool) else torch.tensor(x).unsqueeze(0) for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        make()(tokens(1, 6), **given)


def test_documents_do_not_start_behind_a_cache(make, tokens):
    model, ids = make(), tokens(1, 6)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="past_key_values are not supported with packed documents"):
        model(ids, past_key_values=cache, position_ids=torch.tensor([[6, 7, 8, 0, 1, 2]]))


@pytest.mark.parametrize("positions", [[5], [5, 6, 7]], ids=str)
@torch.no_grad()
def test_positions_that_continue_a_cache_change_nothing(make, tokens, positions):
    model, ids = make(), tokens(1)
    cache = model(ids[:, :5]).past_key_values
    found = model(ids[:, 5 : 5 + len(positions)], past_key_values=cache, position_ids=torch.tensor([positions])).logits
    assert_close(found, model(ids).logits[:, 5 : 5 + len(positions)], 1e-9, "logits")


@pytest.mark.parametrize("positions", [[50], [0], [6], [40, 41, 42], [0, 1, 2]], ids=str)
@torch.no_grad()
def test_positions_that_do_not_continue_a_cache_are_refused(make, tokens, positions):
    model, ids = make(), tokens(1)
    cache = model(ids[:, :5]).past_key_values
    more, where = ids[:, 5 : 5 + len(positions)], torch.tensor([positions])
    with pytest.raises(ValueError, match=f"position_ids must continue .* past_key_values: .*; got {positions[0]} for"):
        model(more, past_key_values=cache, position_ids=where)
    assert cache.get_seq_length() == 5
    # With a mask of all tokens, positions are known exactly.
    with pytest.raises(ValueError, match="got 4 for the token after 5 others"):
        model(ids[:, 5:6], torch.ones(1, 6), past_key_values=cache, position_ids=torch.tensor([[4]]))


@pytest.mark.parametrize("counting", [False, True], ids=["texts", "padding too"])
@torch.no_grad()
def test_positions_of_padded_texts_continue_a_cache(make, tokens, pad_left, counting):
    model, texts = make(), [row[:length] for row, length in zip(tokens(), (12, 7), strict=True)]
    ids, mask = pad_left(texts)
    positions = torch.arange(12).expand(2, -1) if counting else (mask.cumsum(1) - 1).clamp(min=0)
    expected, cache, found = model(ids, attention_mask=mask).logits, None, []
    for start, stop in ((0, 4), (4, 9), (9, 10), (10, 11), (11, 12)):
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        out = model(ids[:, start:stop], past_key_values=cache, use_cache=True, **given)
        cache = out.past_key_values
        found.append(out.logits)
    for row, text in enumerate(texts):
        assert_close(torch.cat(found, 1)[row, -len(text) :], expected[row, -len(text) :], 1e-9, "logits")
    with pytest.raises(ValueError, match="position_ids must continue"):
        model(ids[:, :1], torch.ones(2, 13), positions[:, -1:] + 2, cache)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_refuses_positions_that_start_again(make, tokens):
    """Under torch.compile their values are unknown, so they cannot be split and must not be ignored."""
    model, ids = make(), tokens(1, 6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    positions = torch.arange(6)[None]
    expected = model(ids, use_cache=False).logits
    assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, expected, 1e-12, "logits")
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(ids, position_ids=positions % 3, use_cache=False)
