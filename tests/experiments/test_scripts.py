"""The programs of experiments/: preparing the corpus, converting a teacher, and writing tables from results."""

import json
import tarfile

import pytest

from experiments import conversion, prepare_corpus, reproduction_tables
from experiments.store import Store, StoredResult
from sympow.convert.evaluation import LossAtContext, ModelLosses
from sympow.data import open_dataset, prepare


def test_a_corpus_is_prepared_packed_and_unpacked_elsewhere(tmp_path, capsys):
    for split, words in (("train", ["state", "gate"]), ("heldout", ["rotation"])):
        (tmp_path / "texts" / split).mkdir(parents=True)
        for word in words:
            (tmp_path / "texts" / split / f"{word}.txt").write_text(f"{word} and {word} " * 20)
    with tarfile.open(tmp_path / "texts.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "texts", ".")
    texts, tokens = tmp_path / "texts.tar.xz", tmp_path / "tokens.tar.xz"

    def run(*arguments):
        prepare_corpus.main([*map(str, arguments)])

    run(texts, "--out", tmp_path / "here", "--archive", tokens, "--vocab-size", 270, "--workers", 1)
    run(tokens, "--out", tmp_path / "there")
    assert "train: 2 documents" in capsys.readouterr().out
    for split in ("train", "heldout"):
        here, there = (open_dataset(tmp_path / name, split) for name in ("here", "there"))
        assert here.fingerprint == there.fingerprint
        text = there.load_tokenizer().decode(there.read(0, 0, there.lengths[0]))
        assert text == ("gate and gate " * 20 if split == "train" else "rotation and rotation " * 20)
    with tarfile.open(tmp_path / "other.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "texts" / "train", "train")
    with pytest.raises(SystemExit, match=r"must hold heldout/\*.txt"):
        run(tmp_path / "other.tar.xz", "--out", tmp_path / "nowhere")
    # Shards that were damaged on the way are refused, and the folder does not count as prepared.
    (damaged,) = (tmp_path / "here").glob("train-*.tokens.npy")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    prepare_corpus.pack_shards(tmp_path / "here", tmp_path / "damaged.tar.xz")
    with pytest.raises(ValueError, match=damaged.name):
        run(tmp_path / "damaged.tar.xz", "--out", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "manifest.json").exists()
    # Texts that were not tokenized are no corpus of a conversion.
    smoke = conversion.SCALES["smoke"]
    with pytest.raises(SystemExit, match=r"texts.tar.xz holds no token shards"):
        conversion.Conversions(smoke, texts, tmp_path / "out", "cpu", False, "students", {}).run("data")


def row(variant, power, context, seed, loss, **others):
    return {
        "run": f"{variant}-{power}-{context}-{seed}",
        "variant": variant,
        "power": power,
        "context": context,
        "seed": seed,
        "tokens": 1_000,
        "changes": {},
        "config": {"optimizer": {"learning_rate": 2e-3}},
        "status": "done",
        "final_loss": loss,
        "heldout_loss": loss + 1,
        "by_context": {"8192": loss + 1, "32768": loss + 2},
        **others,
    }


def tables_of(rows):
    return "\n".join(reproduction_tables.tables(reproduction_tables.Results(rows)))


def test_tables_say_what_holds_and_what_does_not(tmp_path):
    rows = []
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        rows += [
            row("softmax", None, 8192, seed, 2.0 + noise),
            row("sympow", 2, 8192, seed, 2.5 + noise),
            row("gating", 2, 8192, seed, 2.1 + noise),
            # Better with one seed by as much as it is worse with the other.
            row("conformal", 2, 8192, seed, 2.1 - 2 * noise),
            row("conformal", 2, 8192, seed, 2.05 + noise + seed / 1000, changes={"rotation_rate": 0.1}),
        ]
        rows += [row("softmax", None, 256, seed, 2.0 + noise), row("sympow", 2, 256, seed, 2.1 + noise)]
    # On other data, which no table has.
    rows.append(row("gating", 2, 128, 0, 4.321, changes={"data": "mqar:pairs=16"}))
    rows.append(row("conformal", 2, 8192, 7, 9.0, status="diverged"))
    rows = [{**one, "run": f"{one['run']}{len(one['changes'])}"} for one in rows]
    Store(tmp_path / "results").add("some", [StoredResult(one, {"metrics": {}}) for one in rows])
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- results: begin -->\nyesterday\n<!-- results: end -->\nAfter.\n")
    reproduction_tables.main(["--results", str(tmp_path / "results"), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "yesterday" not in text
    lines = text.splitlines()
    assert (
        "| 2, 8,192 | 2.362, 2.000 ± 0.010 | 2.48, 2.500 ± 0.010 | 2.365, 2.100 ± 0.010 | 2.296, 2.100 ± 0.020 |"
        in lines
    )
    assert "| sympow − softmax | p = 2, 8,192 | +0.118 | +0.500 (± 0.000, 3 seeds) | sympow is worse | yes |" in lines
    assert "| gating − sympow | p = 2, 8,192 | -0.115 | -0.400 (± 0.000, 3 seeds) | gating is better | yes |" in lines
    conformal = next(line for line in lines if "conformal − gating" in line)
    assert conformal.endswith("| conformal is better | within the noise |")
    growth = next(line for line in lines if "growth of sympow − softmax" in line)
    assert "| p = 2, 256 to 8,192 | +0.102 | +0.400 (± 0.000, 3 seeds) | the gap grows | yes |" in growth
    assert "4.321" not in text
    slower = next(line for line in lines if "rotation_rate 0.1" in line)
    assert "-0.049 (± 0.001, 3 seeds)" in slower
    assert slower.endswith("| yes |")
    assert any("32,768" in line and "4.000" in line for line in lines)


def test_a_rotation_is_compared_with_gating_on_fresh_seeds_apart_from_the_others():
    # Behind on the first three seeds, ahead on the others.
    rows = [row("gating", 2, 4_096, seed, 2.0) for seed in range(5)]
    rows += [row("conformal", 2, 4_096, seed, 2.1 if seed < 3 else 1.8) for seed in range(5)]
    chosen, mark, fresh = tables_of(rows).partition("On fresh seeds")
    assert mark
    assert "| conformal | 4,096 | – | +0.100 (± 0.000, 3 seeds) | +0.100 (± 0.000, 3 seeds) | no |" in chosen
    assert "| conformal | 4,096 | – | -0.200 (± 0.000, 2 seeds) | -0.200 (± 0.000, 2 seeds) | yes |" in fresh


def test_learning_rates_are_compared_for_runs_of_equal_length():
    def at_rate(tokens, rate, seed, loss):
        changes = {"tokens": tokens, **({} if rate == 2e-3 else {"learning_rate": rate})}
        config = {"optimizer": {"learning_rate": rate}}
        return row("gating", 2, 4_096, seed, loss, tokens=tokens, changes=changes, config=config)

    rows = [at_rate(1_000, rate, seed, 2.0 + 100 * rate + seed / 10) for rate in (2e-3, 1e-3) for seed in (0, 1)]
    # Seeds on which nothing was chosen, and a length with one rate alone.
    rows += [at_rate(1_000, 2e-3, 3, 9.0), at_rate(2_000, 2e-3, 0, 9.0)]
    table = tables_of(rows).partition("### Learning rates\n\n")[2].splitlines()
    assert table[2:] == [
        "| gating | 2 | 4,096 | 1,000 | 0.001 | 2.150 ± 0.071 | 3.150 ± 0.071 |",
        "| gating | 2 | 4,096 | 1,000 | 0.002 | 2.250 ± 0.071 | 3.250 ± 0.071 |",
    ]


def test_an_ordering_holds_only_if_it_is_the_authors():
    rows = []
    for context, softmax, sympow in ((1_024, 3.9, 4.0), (16_384, 4.4, 4.7)):
        rows += [row("softmax", None, context, seed, softmax) for seed in (0, 1)]
        rows += [row("sympow", 4, context, seed, sympow + seed / 1000) for seed in (0, 1)]
    lines = tables_of(rows).splitlines()
    # The authors saw sympow ahead of softmax at 16,384 tokens with p = 4, and the gap shrink; here it is behind.
    ordering = next(line for line in lines if line.startswith("| sympow − softmax | p = 4, 16,384 | -0.044 |"))
    assert ordering.endswith("| sympow is better | no |")
    growth = next(line for line in lines if "p = 4, 1,024 to 16,384 | -0.044 |" in line)
    assert growth.endswith("| the gap shrinks | no |")
    # The authors' values are equal as far as one can read off their plot, so there is nothing to agree with.
    level = next(line for line in lines if "| p = 4, 1,024 |" in line)
    assert "| +0.000 | +0.10" in level
    assert level.endswith("| none | – |")


def test_tables_of_sweeps_follow_if_there_are_results(tmp_path):
    assert list(reproduction_tables.sweep_tables(Store(tmp_path))) == []
    results = []
    for name, accuracies in (("gating", [0.5, 0.5]), ("conformal", [1.0, 0.99])):
        run = f"parity_{name}"
        numbers = {"learning_rates": [0.1], "best_rate": 0.1, "accuracy": {"64": [accuracies], "256": [[0.5, 0.5]]}}
        about = {"run": run, "task": "parity", "sweep": name, "chance": 0.5, "settings": {}}
        results.append(StoredResult({**about, **numbers}, {}))
    Store(tmp_path).add("state_tracking", results)
    lines = list(reproduction_tables.sweep_tables(Store(tmp_path)))
    assert lines[0].startswith("### State tracking: accuracy in %")
    assert "| | parity (chance 50) |" in lines
    assert "| conformal | 99.5, 50.0 |" in lines
    assert "| gating | 50.0, 50.0 |" in lines
    assert lines.index("| gating | 50.0, 50.0 |") < lines.index("| conformal | 99.5, 50.0 |")
    # Remedies follow by name, so that a model with noise stands beside the one without.
    Store(tmp_path).add("tracking_remedies", results)
    lines = list(reproduction_tables.sweep_tables(Store(tmp_path)))[len(lines) :]
    assert lines[0].startswith("### State tracking beyond the training length")
    assert lines.index("| conformal | 99.5, 50.0 |") < lines.index("| gating | 50.0, 50.0 |")


def test_the_table_of_recall_follows_if_there_are_results(tmp_path):
    assert list(reproduction_tables.sweep_tables(Store(tmp_path))) == []
    numbers = {
        "learning_rates": [0.1, 0.2],
        "best_rate": 0.2,
        "steps": 9,
        "state_numbers": 5_000,
        "state_bytes": 20_000,
    }
    found = {"overall": [[0.1, 0.1], [0.5, 0.7]], "by_shape": {"64/4": [[0.1, 0.1], [1.0, 1.0]]}}
    row = {"run": "recall_mine", "sweep": "mine", "settings": {}, **numbers, **found}
    Store(tmp_path).add("recall", [StoredResult(row, {})])
    lines = list(reproduction_tables.sweep_tables(Store(tmp_path)))
    assert "| mine | 5,000 | 20,000 | 0.2 | 9 | 60.0 ± 14.1 | 100.0 ± 0.0 |" in lines
    assert "| GLA (published) | | about 67,000 | | | 95 | |" in lines


def test_students_of_a_conversion_are_compared_with_the_teacher(tmp_path):

    def measured(name, tokens, losses):
        entry = LossAtContext(sum(losses) / 2, losses, losses[1], {"9.5": losses[0]})
        return ModelLosses(name, tokens, {64: entry, 256: entry})

    for seed, loss in enumerate((3.1, 3.2, 3.3)):
        folder = tmp_path / "students" / f"all-{seed}" / "evaluations"
        measured("teacher", 0, [2.5, 3.5]).save(folder / "teacher.json")
        measured("distill", 40, [loss - 0.5, loss + 0.5]).save(folder / "distill.json")
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    # The teacher was trained by an earlier call, with --teacher-tokens, which this one does not repeat.
    (tmp_path / "teacher" / "model").mkdir()
    (tmp_path / "teacher" / "model" / conversion.TRAINED_FILE).write_text('{"teacher_tokens": 640}')
    facts = {"scale": "smoke", "teacher_tokens": 51_200}
    conversion.write_results(tmp_path, "students", tmp_path / "results", facts)
    tables = (tmp_path / "results" / "conversion.md").read_text()
    assert "| teacher | | | 3.000 | 3.000 |" in tables
    assert "| all layers, after stage 2 | 3 | 40 | 3.200 (+0.200 ± 0.100) | 3.200 (+0.200 ± 0.100) |" in tables
    lines = [json.loads(line) for line in (tmp_path / "results" / "conversion.jsonl").read_text().splitlines()]
    assert lines[0] == {"facts": {"scale": "smoke", "teacher_tokens": 640}}
    assert [line.get("step") for line in lines] == [None, "teacher", "all-0", "all-1", "all-2"]
    last = lines[-1]["by_context"]["256"]
    assert last == {"loss": 3.3, "late": 3.8, "sequences": 2, "less_teacher": 0.3, "error": 0.0, "median": 0.3}
    assert (tmp_path / "results" / "conversion_by_position.png").is_file()


def test_no_student_may_see_more_than_a_fifth_of_the_teachers_tokens(tmp_path):
    for scale in conversion.SCALES.values():
        conversions = conversion.Conversions(scale, tmp_path, tmp_path, "cpu", False, "students", {})
        for step in conversion.STEPS[2:-1]:
            if step.startswith("chosen"):
                continue
            recipe = conversions.conversion(step).recipe
            assert 5 * (recipe.match_tokens + recipe.distill_tokens + recipe.extend_tokens) <= scale.teacher_tokens
        more = {"distill_tokens": scale.teacher_tokens // 5}
        with pytest.raises(SystemExit, match="more than a fifth of"):
            conversion.Conversions(scale, tmp_path, tmp_path, "cpu", False, "students", more).conversion("all-1")


def test_layers_are_chosen_by_how_well_stage_1_matched_them(tmp_path):
    experiment = conversion.Conversions(conversion.SCALES["small"], tmp_path, tmp_path, "cpu", False, "students", {})
    with pytest.raises(SystemExit, match="need all-0"):
        experiment.conversion("chosen-0")
    folder = tmp_path / "students" / "all-0"
    (folder / "stages" / "match").mkdir(parents=True)
    # The order at the end counts, not that of the first steps.
    lines = [dict.fromkeys(range(4), 1.0), {0: 0.2, 1: 0.1, 2: 0.3, 3: 0.05}]
    metrics = [
        {"step": step, **{f"match_loss/layer_{n}": e for n, e in line.items()}} for step, line in enumerate(lines)
    ]
    written = "".join(json.dumps(line) + "\n" for line in [*metrics, {"step": 2, "loss": 0.1}])
    (folder / "stages" / "match" / "metrics.jsonl").write_text(written)
    ModelLosses("match", 40, {}).save(folder / "evaluations" / "match.json")
    for seed in range(3):
        chosen = experiment.conversion(f"chosen-{seed}")
        assert chosen.swap.chosen_layers() == [1, 3]
        recipe = chosen.recipe
        assert 5 * (recipe.match_tokens + recipe.distill_tokens) <= conversion.SCALES["small"].teacher_tokens


def test_changes_of_a_conversion_are_checked_before_the_teacher_is_trained():
    assert conversion.read_change("gating=vector") == ("gating", "vector")
    assert conversion.read_change("distill_rate=6e-4") == ("distill_rate", 6e-4)
    for change in ("nonsense=3", "nonsense", "power=two", "beta2=3"):
        with pytest.raises(SystemExit, match=f"--change takes settings as in distill_rate=6e-4; got '{change}'"):
            conversion.read_change(change)


@pytest.mark.slow
def test_a_teacher_is_trained_and_converted(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(8):
        words = " ".join(f"{(number * 7 + place) % 97} and {place % 13}" for place in range(400))
        (tmp_path / "texts" / f"{number}.txt").write_text(words)
    prepare([tmp_path / "texts"], tmp_path / "data", heldout=0.3, tokenizer="bytes", workers=1)
    words = ["--scale", "smoke", "--corpus", tmp_path / "data", "--out", tmp_path / "out", "--device", "cpu"]
    words += ["--results", tmp_path / "results", "--no-compile", "--only", "data,teacher,hybrid-0,results"]
    words = [*map(str, words)]
    conversion.main(words)
    assert "| every other layer, after stage 2 | 1 | 10,240 |" in (tmp_path / "results" / "conversion.md").read_text()
    assert (tmp_path / "out" / "students" / "hybrid-0" / "model" / "model.safetensors").is_file()
    trained = json.loads((tmp_path / "out" / "teacher" / "model" / conversion.TRAINED_FILE).read_text())
    assert trained == {"teacher_tokens": 51_200, "teacher_rate": 3e-3}
    # A teacher that was interrupted continues with the settings that it was begun with.
    (tmp_path / "out" / "teacher" / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="holds a teacher that was begun with"):
        conversion.main([*words, "--teacher-rate", "1e-3"])


def of_text(variant, batch, rate, seed, loss, **changes):
    size = {"batch_tokens": batch, "micro_batch_tokens": batch, "steps": 10, "learning_rate": rate}
    name = f"{variant}{batch}{rate}{seed}{changes}"
    return row(variant, 2, 1_024, seed, loss, run=name, changes={**changes, **size}, tokens=10 * batch)


def test_rotations_on_text_are_compared_with_gating_at_the_best_rate_of_each(tmp_path):
    rows = [
        # Rates that were given up after one seed do not count.
        of_text("gating", 4_096, 1e-3, 0, 3.0),
        of_text("gating", 4_096, 2e-3, 0, 2.5),
        of_text("conformal", 4_096, 2e-3, 0, 9.0, rotary="pairs"),
        of_text("conformal", 4_096, 1e-3, 0, 2.4, rotary="pairs"),
        of_text("conformal", 4_096, 4e-3, 0, 0.0, rotary="pairs") | {"status": "diverged", "heldout_loss": None},
    ]
    for seed in (1, 2):
        rows.append(of_text("gating", 4_096, 2e-3, seed, 2.5 + seed / 10))
        rows.append(of_text("conformal", 4_096, 1e-3, seed, 2.4 + seed / 10 + seed / 1000, rotary="pairs"))
    for seed, noise in enumerate((0.01, -0.02, 0.02)):
        rows.append(of_text("gating", 4_096, 2e-3, seed, 2.6 + seed / 10, max_rate=1.0))
        rows.append(of_text("conformal", 4_096, 2e-3, seed, 2.6 + seed / 10 + noise, max_rate=1.0))
    rows += [of_text("gating", 8_192, 4e-3, 0, 2.3), of_text("conformal", 8_192, 2e-3, 0, 2.4)]
    # Of rates with as many seeds the mean decides, and not the first seed.
    for seed, (one, other) in enumerate(((2.0, 2.1), (3.0, 2.2), (3.0, 2.3))):
        rows += [of_text("gating", 16_384, 4e-3, seed, one), of_text("gating", 16_384, 2e-3, seed, other)]
        rows.append(of_text("conformal", 16_384, 1e-3, seed, other - 0.05))
    lines = "\n".join(reproduction_tables.text_rotation_tables(rows)).splitlines()
    titles = [line for line in lines if line.startswith("###")]
    assert [title.split("tokens")[0] for title in titles] == [
        "### Rotation on text: batches of 4,096 ",
        "### Rotation on text: batches of 8,192 ",
        "### Rotation on text: batches of 16,384 ",
    ]
    less = "(± 0.001, 3 seeds)"
    step = f"| conformal, rotary pairs | 0.001 | gating | 0.002 | -0.099 {less} | -0.099 {less} | ahead |"
    assert step in lines
    assert any(line.startswith("| conformal | 0.001 | gating | 0.002 | -0.050 (± 0.000, 3 seeds)") for line in lines)
    slower = [line for line in lines if line.startswith("| conformal, max_rate 1.0 |")]
    assert [line.split("|")[3].strip() for line in slower] == ["gating", "gating, max_rate 1.0"]
    assert slower[0].endswith("| behind |")
    assert slower[1].endswith("| within two standard errors |")
    assert "| gating, max_rate 1.0 | 0.002 | gating | 0.002 | +0.100 (± 0.000, 3 seeds) |" in "\n".join(lines)
    assert any(line.endswith("| +0.100 (one seed) | +0.100 (one seed) | behind (one seed) |") for line in lines)
    said = [line for line in lines if line.startswith("Of ")]
    assert said[0] == (
        "Of 3 comparisons of rotations, ahead by more than two standard errors are conformal, rotary pairs (of gating)."
    )
    assert said[1] == "Of 1 comparisons of rotations, ahead by more than two standard errors is none."
    # A switch of which every rate has diverged on some seed is not compared.
    diverged = of_text("gating", 4_096, 2e-3, 0, 0.0) | {"status": "diverged"}
    assert list(reproduction_tables.text_rotation_tables([diverged, *rows[2:5]])) == []
    # Seeds beyond those of the scale: nothing was chosen on them, and they have a table of their own.
    for seed in (3, 4):
        rows.append(of_text("gating", 4_096, 2e-3, seed, 2.0))
        rows.append(of_text("conformal", 4_096, 1e-3, seed, 2.05, rotary="pairs"))
    with_fresh = "\n".join(reproduction_tables.text_rotation_tables(rows))
    chosen, _, fresh = with_fresh.partition("On fresh seeds")
    assert step in chosen
    both = "+0.050 (± 0.000, 2 seeds)"
    assert f"| conformal, rotary pairs | 0.001 | gating | 0.002 | {both} | {both} | behind |" in fresh.splitlines()
    assert "max_rate" not in fresh
    # Runs of other experiments are in tables of their own.
    results, page = tmp_path / "results", tmp_path / "page.md"
    others = [row("gating", 2, 1_024, 0, 2.0), row("conformal", 2, 1_024, 0, 2.1)]
    others += [
        row(kind, 2, 1_024, 0, 2.2, run=kind, changes={"schedule": "cosine"}) for kind in ("gating", "conformal")
    ]
    for name, of in (("rotation", others), ("text_rotation", rows)):
        Store(results).add(name, [StoredResult(one, {"metrics": {}}) for one in of])
    page.write_text(f"{reproduction_tables.BEGIN}{reproduction_tables.END}")
    reproduction_tables.main(["--results", str(results), "--page", str(page)])
    pays = page.read_text().partition("### Does rotation pay?")[2].partition("###")[0]
    assert pays.count("| conformal |") == 2
    assert "| conformal | 1,024 | schedule cosine | +0.000 (one seed) |" in pays
    written = page.read_text()
    assert step in written
    # A folder without results, such as one of another name, leaves the page as it is.
    with pytest.raises(
        SystemExit, match=f"--results must be a folder with the tables of experiments, and {tmp_path} has"
    ):
        reproduction_tables.main(["--results", str(tmp_path), "--page", str(page)])
    assert page.read_text() == written
