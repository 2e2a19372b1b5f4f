"""Shards on the fused kernels, in float32, against float64."""

import pytest
from parallel import cases

import support
from support import float32_tolerance, interpreted, within

pytest.importorskip("triton", reason="needs Triton")
pytestmark = interpreted
LONGEST = 290  # tokens of a case below


@pytest.mark.parametrize(
    ("lengths", "kind", "offsets", "fused", "options"),
    [
        pytest.param([140, 30, 9], {}, None, [True, True, True], {}, marks=pytest.mark.slow),
        ([20, 0, 9], {"gate": "none", "rotation": "fixed"}, None, [True, False, True], {}),
        # Ranks with one slice of a document run the fused kernels, those with several do not.
        pytest.param([30, 40, 20], {}, [0, 20, 80, 90], [False, True, False], {}, marks=pytest.mark.slow),
        # Several chunks per rank; gates closed at the first token of a rank and of a chunk.
        pytest.param(
            [130, 140, 20],
            {"heads": 4, "key_heads": 2},
            None,
            [True, True, True],
            {"chunk_size": 128, "closed": (130, 258), "exchange": "rounds"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [9, 130, 5],
            {"gate": "none", "batch": 2},
            None,
            [True, True, True],
            {"chunk_size": 128},
            marks=pytest.mark.slow,
        ),
        # An odd batch, so that the overlapped halves differ; a gate closed at a rank's first token; an empty rank.
        pytest.param(
            [40, 0, 30], {"batch": 3, "heads": 1}, None, [True, False, True], {"closed": (40,)}, marks=pytest.mark.slow
        ),
        pytest.param(
            [30, 20, 10],
            {"batch": 1, "heads": 1, "rotation": "none"},
            None,
            [True, True, True],
            {"exchange": "gather"},
            marks=pytest.mark.slow,
        ),
        # Without gates: states pass unchanged, or end at a document boundary.
        pytest.param([30, 40, 20], {"gate": "none"}, [0, 20, 90], [False, True, True], {}, marks=pytest.mark.slow),
    ],
    ids=["gated", "ungated", "documents", "chunks", "ungated chunks", "batch", "one head", "ungated documents"],
)
def test_shards_on_the_kernels(pool, lengths, kind, offsets, fused, options):
    answers = pool.run(
        cases.on_kernels, 3, seed=1 + support.seed_shift, lengths=lengths, kind=kind, offsets=offsets, **options
    )
    assert [used for used, _ in answers] == fused
    for _, errors in answers:
        for name, error in errors.items():
            within(error, float32_tolerance(name, LONGEST), name)
