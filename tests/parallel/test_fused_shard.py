"""Shards on the fused kernels against float64, within twice the error of plain PyTorch in float32 on the whole."""

import pytest
from parallel import cases

from support import interpreted

pytest.importorskip("triton", reason="needs Triton")
pytestmark = interpreted


@pytest.mark.parametrize(
    ("lengths", "kind", "offsets", "halves", "options"),
    [
        ([140, 30, 9], {}, None, [2, 2, 2], {}),
        ([20, 0, 9], {"gate": "none", "rotation": "fixed"}, None, [2, 0, 2], {}),
        # The rank with one piece of a document goes through here, those with several around it in other ways.
        ([30, 40, 20], {}, [0, 20, 80, 90], [0, 2, 0], {}),
        # Several chunks a rank; gates closed at a rank's first token and at a chunk's.
        (
            [130, 140, 20],
            {"heads": 4, "key_heads": 2},
            None,
            [2, 2, 2],
            {"chunk_size": 128, "closed": (130, 258), "exchange": "rounds"},
        ),
        ([9, 130, 5], {"gate": "none", "batch": 2}, None, [2, 2, 2], {"chunk_size": 128}),
    ],
    ids=["gated", "ungated", "documents", "chunks", "ungated chunks"],
)
def test_shards_on_the_kernels(pool, lengths, kind, offsets, halves, options):
    answers = pool.run(cases.on_kernels, 3, seed=1, lengths=lengths, kind=kind, offsets=offsets, **options)
    assert [used for used, _ in answers] == halves
    for _, errors in answers:
        for name, (error, measured) in errors.items():
            assert error <= max(2 * measured, 2e-6), f"{name} is off by {error:.1e}, plain PyTorch by {measured:.1e}"
