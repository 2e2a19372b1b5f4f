"""The plan of a conversion: which stages there are, and the tokens that each has seen."""

import pytest

from sympow.convert import ConvertConfig
from sympow.convert.stages import plan


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        # Multiples of a batch, 128 tokens; remainders that would add up to another batch; less than a batch.
        ((256, 512, 384), (2, 4, 3)),
        ((255, 383, 200), (1, 2, 1)),
        ((1, 250, 127), (1, 1, 1)),
    ],
)
def test_stages_count_the_tokens_of_their_steps(tokens, steps):
    match, distill, extend = tokens
    config = ConvertConfig().changed(
        context=16,
        batch_tokens=128,
        match_tokens=match,
        distill_tokens=distill,
        extend_tokens=extend,
        without_match=True,
    )
    stages = {stage.name: stage for stage in plan(config)}
    assert list(stages) == ["match", "distill", "extend", "distill-without-match", "extend-without-match"]
    assert [stages[name].run.steps for name in ("match", "distill", "extend")] == list(steps)
    assert stages["distill-without-match"].run.steps == steps[0] + steps[1]
    assert stages["extend-without-match"].run.steps == steps[2]
    seen = {name: stage.seen // 128 for name, stage in stages.items()}
    assert seen == {
        "match": steps[0],
        "distill": steps[0] + steps[1],
        "extend": sum(steps),
        "distill-without-match": steps[0] + steps[1],
        "extend-without-match": sum(steps),
    }
