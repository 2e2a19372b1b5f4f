"""`convert`: swaps a teacher's attention, runs the stages one after another, evaluates before and after each, reports.

The folder of a conversion:

    conversion.json                   teacher, data and settings, which a resumed conversion must share
    evaluations/NAME.json             held-out losses of the teacher, the untrained student, and after each stage
    stages/NAME/model/                the student after a stage, in float32
    stages/NAME/metrics.jsonl         training metrics, with TensorBoard events beside them
    stages/NAME/checkpoints/          checkpoints, while the stage runs
    model/                            the result with its tokenizer, in the teacher's dtype (gates, rotations: float32)
    report.md, report.html, figures/  the comparison of teacher and student
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sympow.convert.config import FREE, ConvertConfig
from sympow.convert.evaluation import LossAtContext, ModelLosses, held_out_sequences, measure_losses
from sympow.convert.models import (
    TOKENIZER_FILES,
    add_adapters,
    cast_weights,
    check_can_swap,
    check_contexts,
    check_teacher,
    check_tokens,
    decoder_layers,
    find_teacher,
    fingerprint,
    load_causal_model,
    make_student,
    most_positions,
    output_weight,
)
from sympow.convert.objectives import Distillation, Matching, NextToken, StageObjective
from sympow.convert.report import label_of, write_conversion_report
from sympow.convert.stages import EVALUATIONS, STAGES, START, TEACHER, Stage, make_loader, plan, train_stage
from sympow.data.dataset import TokenDataset
from sympow.data.open import open_dataset
from sympow.data.provenance import TrainedOn
from sympow.errors import ArgumentError, UserError
from sympow.extras import require
from sympow.files import naming, write_atomically
from sympow.hf.transformers_module import load_without_code, quiet
from sympow.invocation import under_torchrun
from sympow.parsing import read_json
from sympow.train.loop import Surroundings, surroundings
from sympow.train.processes import process_group
from sympow.train.run_folder import CHECKPOINTS, EXPORT, claimed_folder

SETTINGS_FILE = "conversion.json"


def convert(teacher: Path | str, config: ConvertConfig, out: Path | str, *, device: str | None = None) -> bool:
    """Converts a pretrained causal language model, and writes everything into one folder.

    Called again with the same arguments, it resumes an interrupted conversion.

    Args:
        teacher: folder that `save_pretrained` wrote, or a name on the Hub.
        config: settings of the conversion.
        out: folder of the conversion.
        device: "cpu" or "cuda"; None: a GPU if there is one.

    Returns:
        whether the conversion is complete. False: Ctrl-C or SIGTERM stopped it after it saved a checkpoint.

    Raises:
        ValueError: teacher, data and settings do not fit together, or the folder holds another conversion.
        NonFiniteLossError: the loss or a gradient is not finite.
    """
    if under_torchrun():
        raise UserError("convert runs in one process, on one device; it was started by torchrun")
    needed = {"transformers": "hf", "matplotlib": "report"}
    if config.execution.tensorboard:
        needed["tensorboard"] = "train"
    if config.recipe.lora:
        needed["peft"] = "lora"
    for module, extra in needed.items():
        require(module, extra)
    with ExitStack() as held:
        held.enter_context(quiet())
        place = held.enter_context(process_group(device))
        claim = held.enter_context(claimed_folder(Path(out), resume=True, place=place))
        folder = claim.folder
        if (folder / EXPORT).exists() and not (folder / SETTINGS_FILE).is_file():
            raise ArgumentError(
                "out",
                f"must be a new folder or that of a conversion, got {folder}: the result would replace its {EXPORT}",
            )
        precision = config.execution.precision
        if precision == "auto":
            precision = "bf16" if place.device.type == "cuda" else "fp32"
        return _Conversion(teacher, config, held.enter_context(surroundings(place, claim, precision))).run()


class _Conversion:
    def __init__(self, source: Path | str, config: ConvertConfig, around: Surroundings) -> None:
        self.source, self.config, self.around, self.dtype = source, config, around, around.dtype
        self.out, self.device = around.claim.folder, around.place.device
        self.stages = plan(config)
        self.dataset: TokenDataset = open_dataset(config.text.data)
        find_teacher(source, say=_say)
        self.teacher = load_causal_model(source, self.device).requires_grad_(False)
        check_teacher(self.teacher, source)
        self.fingerprint = fingerprint(self.teacher)
        self._check_same_settings()
        check_can_swap(self.teacher, config.swap)
        positions = most_positions(self.teacher)
        check_contexts(config, positions)
        self._check_rows()
        notes = [check_tokens(self.teacher, source, self.dataset)]
        self.sequences, more = held_out_sequences(
            open_dataset(config.text.data, "heldout"), config.text, config.execution.micro_batch_tokens, positions
        )
        self.notes = [note for note in (*notes, *more) if note]
        # Written after all checks: from now on the folder refuses other conversions.
        write_atomically(self.out / SETTINGS_FILE, (json.dumps(self._facts(), indent=2) + "\n").encode())

    def run(self) -> bool:
        """All that is not done yet; returns whether the conversion is complete (not stopped)."""
        for note in self.notes:
            _say(note)
        parameters = sum(parameter.numel() for parameter in self.teacher.parameters())
        tokens = f"{self.dataset.name}: {int(self.dataset.lengths.sum()):,} tokens"
        _say(f"teacher {self.source}: {parameters:,} parameters on {self.device.type}; {tokens}")
        evaluations = {TEACHER: self._evaluate(TEACHER, 0), START: self._evaluate(START, 0)}
        for stage in self.stages:
            if self.around.stop:
                return False
            folder = self.out / STAGES / stage.name
            if not (self._is_evaluated(stage.name) or (folder / EXPORT).is_dir() or self._train(stage, folder)):
                return False
            # The evaluation comes last: its file marks the stage as complete.
            evaluations[stage.name] = self._evaluate(stage.name, stage.seen)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        self._export()
        write_conversion_report(self.out, self.stages, evaluations, self._facts())
        _say(f"wrote {self.out / EXPORT} and {self.out / 'report.html'}")
        return True

    def _train(self, stage: Stage, folder: Path) -> bool:
        """Trains and saves the student of a stage; returns whether it is complete (not stopped)."""
        student = self._model_after(stage.after)
        new = {name for name, _ in student.named_parameters()} - {name for name, _ in self.teacher.named_parameters()}
        objective = self._objective(stage, student)
        adapted = None
        if self.config.recipe.lora and stage.kind != "match":
            adapted, objective.trained = add_adapters(student, self.config.recipe.lora, new, self.config.execution.seed)
        if self.config.execution.compile:
            objective.compile()
        if self.config.execution.recompute and stage.kind != "match":
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for layer, _ in decoder_layers(student).values():
                # transformers recomputes in training mode only. Setting the layer's own flag, and not those of its
                # submodules, leaves dropout off.
                layer.training = True
        _say(
            f"stage {stage.name}: {stage.run.steps:,} steps of {stage.run.batch_tokens:,} tokens at context "
            f"{stage.context:,}; {sum(p.numel() for p in objective.trained):,} parameters are trained"
        )
        if not train_stage(stage, self.config, objective, self.dataset, folder, self.around):
            return False
        if adapted is not None:
            student = adapted.merge_and_unload()
        with _replacing(folder / EXPORT) as unfinished:
            student.save_pretrained(unfinished)
        return True

    def _objective(self, stage: Stage, student: Any) -> StageObjective:
        if stage.kind == "match":
            return Matching(self.teacher, student, self.dtype)
        if stage.kind == "distill":
            return Distillation(self.teacher, student, self.dtype)
        return NextToken(student, self.dtype)

    def _model_after(self, name: str) -> Any:
        """The teacher, the untrained student, or the student after a stage.

        Students are loaded from disk in any case: a resumed conversion then computes the same.
        """
        if name == TEACHER:
            return self.teacher
        # Compiled layers are reference cycles, which would keep the student that was trained last in memory.
        gc.collect()
        if name == START:
            torch.manual_seed(self.config.execution.seed)
            return make_student(self.source, self.config.swap, self.device)
        folder = self.out / STAGES / name / EXPORT
        if not folder.is_dir():
            raise UserError(f"{folder} is missing; without {self._path(name)}, the same command trains it again")
        return load_causal_model(folder, self.device, torch.float32)

    def _export(self) -> None:
        """Writes the final student, not the one without stage 1, in the teacher's dtype and with its tokenizer."""
        main = [stage for stage in self.stages if stage.name == stage.kind]
        student = self._model_after(main[-1].name if main else START)
        text = self.config.text
        context = self.config.extended_context if self.config.recipe.extend_tokens else text.context
        with _replacing(self.out / EXPORT) as folder:
            cast_weights(student, output_weight(self.teacher).dtype).save_pretrained(folder)
            if not Path(self.source).exists() or any((Path(self.source) / name).is_file() for name in TOKENIZER_FILES):
                load_without_code(require("transformers", "hf").AutoTokenizer, self.source).save_pretrained(folder)
            tokenizer = self.dataset.load_tokenizer()
            TrainedOn.of_run(text.data, self.dataset, tokenizer, context=context, short=text.short).save(folder)

    def _known(self, name: str) -> dict[int, LossAtContext]:
        """The losses of a model that have been measured, by context."""
        path = self._path(name)
        return ModelLosses.read(path).by_context if path.is_file() else {}

    def _is_evaluated(self, name: str) -> bool:
        """Whether a model has been evaluated at all contexts; a resumed conversion may ask for more of them."""
        return self.sequences.keys() <= self._known(name).keys()

    def _evaluate(self, name: str, tokens: int) -> ModelLosses:
        """The losses of a model, which is loaded and evaluated if there are contexts at which it has not been."""
        known = self._known(name)
        missing = {length: batches for length, batches in self.sequences.items() if length not in known}
        if missing:
            results = measure_losses(self._model_after(name), missing, self.dtype)
            ModelLosses(name, tokens, dict(sorted({**known, **results}.items()))).save(self._path(name))
            losses = ", ".join(f"{result.loss:.4f} at {length:,}" for length, result in results.items())
            _say(f"held-out loss of the {label_of(name)}: {losses}")
        return ModelLosses.read(self._path(name))

    def _path(self, name: str) -> Path:
        return self.out / EVALUATIONS / f"{name}.json"

    def _facts(self) -> dict[str, Any]:
        """The settings that determine the result, by name."""
        return {
            "teacher": str(self.source),
            "teacher_fingerprint": self.fingerprint,
            "data_fingerprint": self.dataset.fingerprint,
            "precision_used": "fp32" if self.dtype is None else "bf16",
            **self.config.settings(),
        }

    def _check_same_settings(self) -> None:
        path = self.out / SETTINGS_FILE
        if not path.is_file():
            return
        saved = read_json(path)
        if not isinstance(saved, dict):
            raise UserError(f"{path} must hold the settings of a conversion")
        facts = self._facts()
        if missing := [name for name in facts if name not in saved]:
            raise UserError(f"{path} must hold the settings of a conversion, and lacks {', '.join(missing)}")
        for name, value in facts.items():
            if name not in FREE and saved[name] != value:
                raise ArgumentError(
                    name,
                    f"must be that of the conversion in {self.out}, {saved[name]!r}; got {value!r}. "
                    "Choose another folder for another conversion",
                )

    def _check_rows(self) -> None:
        """Refuses data with too little text for one batch of any stage before the first stage runs."""
        for stage in {stage.context: stage for stage in reversed(self.stages)}.values():
            try:
                make_loader(stage, self.config, self.dataset)
            except ValueError as error:
                name = "extend_context" if stage.kind == "extend" else "context"
                raise ArgumentError(
                    name, f"must be short enough for batches of {self.dataset.name}, got {stage.context:,} ({error})"
                ) from error


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder beside another that takes its place at the end of the block: what stands there is always complete."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with naming(folder):
            yield unfinished
    except SafetensorError as error:
        raise OSError(f"{folder} could not be written: {error}") from error
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
