"""Outputs and gradients of a sharded sequence equal those of one process."""

import pytest
from parallel import cases

TOLERANCE = 1e-9


def assert_small(answers):
    for rank, differences in enumerate(answers):
        for name, difference in differences.items():
            assert difference <= TOLERANCE, f"rank {rank}: {name} is off by {difference:.1e}"


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))])
def test_ranks_equal_one_process(pool, ranks):
    for found in pool.run(cases.random_cases, ranks, seeds=range(1000 * ranks, 1000 * ranks + 20)):
        for differences, case in found:
            assert max(differences.values()) <= TOLERANCE, f"{differences}: {case}"


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_state_after_the_sequence_equals_that_of_one_process(pool, ranks, batch):
    """Over 250 cases, in batches that finish within the pool's timeout."""
    first = 1000 * ranks + 21 * batch
    for found in pool.run(cases.random_cases, ranks, seeds=range(first, first + 21), final=True):
        for differences, case in found:
            assert max(differences.values()) <= TOLERANCE, f"{differences}: {case}"


@pytest.mark.parametrize(
    "lengths",
    [[2, 0], [0, 3, 0, 0], *(pytest.param(more, marks=pytest.mark.slow) for more in ([1, 1, 0], [3, 0, 0, 0]))],
)
@pytest.mark.parametrize(
    ("rotation", "initial"),
    [
        ("fixed", False),
        ("pairs", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fixed", True), ("pairs", False))),
    ],
)
def test_a_state_passes_ranks_without_tokens(pool, lengths, rotation, initial):
    case = {"lengths": lengths, "kind": {"rotation": rotation}, "initial": initial, "final": True}
    assert_small(pool.run(cases.compare, len(lengths), seed=7, **case))


@pytest.mark.parametrize("final", [False, True])
def test_the_initial_state_alone_can_require_gradients(pool, final):
    case = {"lengths": [3, 0, 4], "final": final}
    assert_small(pool.run(cases.gradient_of_the_initial_state, 3, seed=8, **case))


@pytest.mark.parametrize("exchange", ["gather", "rounds"])
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_a_gate_closed_at_a_border_lets_nothing_pass(pool, exchange, gate):
    lengths = [5, 4, 1, 6]
    closed = {"closed": (5, 9, 10), "kind": {"gate": gate}, "lengths": lengths, "exchange": exchange}
    assert_small(pool.run(cases.compare, 4, seed=1, **closed))


@pytest.mark.parametrize("exchange", ["gather", "rounds"])
def test_documents_cross_any_number_of_borders(pool, exchange):
    # The second has the last token of rank 0, all of ranks 1 and 2, and the first two of rank 3.
    documents = {"offsets": [0, 4, 14, 15, 20], "lengths": [5, 4, 3, 8], "exchange": exchange}
    assert_small(pool.run(cases.compare, 4, seed=2, **documents))


def test_ungated_states_add_up(pool):
    kind = {"gate": "none", "rotation": "fixed"}
    assert_small(pool.run(cases.compare, 3, seed=3, lengths=[4, 0, 5], kind=kind))


def test_longer_sequences_in_chunks(pool):
    assert_small(pool.run(cases.compare, 3, seed=4, lengths=[200, 90, 150], form="chunked"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_carries_from_one_sharded_call_to_the_next(pool, ranks):
    lengths = {"lengths": [3, 4, 2, 5][:ranks], "more": [2, 0, 6, 1][:ranks]}
    assert_small(pool.run(cases.states_carry_on, ranks, seed=5, **lengths))


def test_ranks_tell_each_other_how_many_tokens_they_have(pool):
    assert_small(pool.run(cases.shards_by_themselves, 3))


def test_a_mesh_has_a_dimension_for_it(pool):
    assert_small(pool.run(cases.of_a_mesh, 4))


@pytest.mark.parametrize("ranks", [2, 3])
def test_softmax_by_an_all_gather_equals_one_process(pool, ranks):
    for seed in range(10):
        for differences, case in pool.run(cases.softmax_compare, ranks, seed=100 * ranks + seed):
            assert max(differences.values()) <= TOLERANCE, f"{differences}: {case}"


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
def test_a_model_on_shards_equals_one_process(pool, mixer):
    assert_small(pool.run(cases.model_logits, 3, mixer=mixer))


@pytest.mark.parametrize(
    ("mixer", "segment_size", "length"), [("sympow", 3, 29), ("sympow", 40, 29), ("softmax", 10, 29)]
)
def test_ranks_evaluate_a_document_together(pool, mixer, segment_size, length):
    assert_small(pool.run(cases.evaluation, 3, mixer=mixer, segment_size=segment_size, length=length))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lengths", "ArgumentError: lengths must have an entry for each of 2 ranks, got 3"),
        ("length", "ArgumentError: q must have the 3 tokens of rank 0 of 2; got 4"),
        ("exchange", "ArgumentError: exchange must be one of 'auto', 'gather', 'rounds'; got 'ring'"),
        ("group", "ArgumentTypeError: group must be a ProcessGroup or a DeviceMesh, got str"),
        (
            "documents",
            "ArgumentError: initial_state and return_state cannot be combined with shards of packed documents",
        ),
        ("offsets", "ArgumentError: cu_seqlens must end at the length, 8; got 7"),
        ("softmax", "ArgumentError: return_state cannot be combined with shards in softmax attention"),
        ("take", "ArgumentError: x must have the whole sequence, 8 tokens, along dim 1; got 4"),
        ("evaluation", "ArgumentError: segment_size must be at least 10 for a softmax model in 2 processes"),
    ],
)
def test_mistakes_are_named(pool, what, message):
    assert pool.run(cases.mistake, 2, what=what)[0].startswith(message)
