"""Loads teacher and student, checks that a conversion supports them, and accesses their layers and features."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sympow.checks import check_at_most
from sympow.convert.config import ConvertConfig, SwapConfig
from sympow.data.dataset import TokenDataset
from sympow.errors import ArgumentError, UserError
from sympow.extras import require
from sympow.hf.transformers_module import load_without_code
from sympow.parsing import read_json

CONFIG_FILE = "config.json"
# The Hub has this long to say whether it has a model. from_pretrained would try for a minute.
HUB_SECONDS = 10
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
# Tokens that are decoded and encoded again to compare tokenizers.
SAMPLE_TOKENS = 512
# Values of each parameter that a model's fingerprint hashes, about.
SAMPLE_WEIGHTS = 4_096
# Entries of a config that a fingerprint leaves out, since they do not describe the model.
UNRELATED = ("_name_or_path", "transformers_version")


def find_teacher(source: Path | str, say: Callable[[str], None]) -> None:
    """Raises a ValueError, within seconds, unless a teacher is there: as a path, in the Hub's cache, or on the Hub.

    Args:
        source: a folder, or a name on the Hub.
        say: called with a line before the Hub is asked.
    """
    name = str(source)
    if Path(source).exists():
        return
    nowhere = f"teacher must be a folder or the name of a model of transformers, got {name!r}: there is no such folder"
    hub, errors = require("huggingface_hub", "hf"), require("huggingface_hub.errors", "hf")
    try:
        if isinstance(hub.try_to_load_from_cache(name, CONFIG_FILE), str):
            return
        say(f"looking for {name} on the Hugging Face Hub")
        hub.HfApi().model_info(name, timeout=HUB_SECONDS)
    except errors.HFValidationError as error:
        # It can only be a path.
        raise UserError(nowhere) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{nowhere}, and the Hugging Face Hub has no such model that you can read") from error
    except (OSError, errors.HTTPError) as error:
        # What the library for HTTP raises is an OSError or not, by the version of huggingface_hub.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{nowhere}, and the Hugging Face Hub cannot be asked: {reason}") from error


def load_causal_model(source: Path | str, device: torch.device, dtype: torch.dtype | str = "auto") -> Any:
    """Loads a causal language model of transformers, in evaluation mode: conversion uses no dropout.

    Args:
        source: a folder that `save_pretrained` wrote, or a name on the Hub.
        dtype: dtype of the parameters; "auto": as they were saved.

    Raises:
        ValueError: there is no such model, or it lacks parameters.
    """
    transformers = require("transformers", "hf")
    path = Path(source)
    if path.exists():
        if not (path / CONFIG_FILE).is_file():
            raise ArgumentError("teacher", f"must be a model of transformers, and {source} has no {CONFIG_FILE}")
        config = read_json(path / CONFIG_FILE)
        if not isinstance(config, dict) or "model_type" not in config:
            raise UserError(
                f"{path / CONFIG_FILE} must have a model_type, which says what model it is of, and has none"
            )
    try:
        # Tensors of another shape are reported with the others below.
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, told = load_without_code(transformers.AutoModelForCausalLM, source, dtype=dtype, **options)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            "teacher", f"must be a folder or the name of a model of transformers, got {str(source)!r}: {reason}"
        ) from error
    # transformers would draw these at random. It also ignores tensors that the config does not describe. So do we,
    # since many published models have some.
    if absent := sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}):
        raise UserError(f"{source} lacks {', '.join(absent)} in the shapes that its {CONFIG_FILE} requires")
    return model.to(device).eval()


def fingerprint(model: Any) -> str:
    """A hash of a model's config and weights, independent of the path that it was loaded from.

    It reads a sample of each parameter only: training changes all values.
    """
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in UNRELATED}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // SAMPLE_WEIGHTS)].float().cpu()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        found.update(sample.numpy().tobytes())
    return found.hexdigest()


def make_student(teacher: Path | str, swap: SwapConfig, device: torch.device) -> Any:
    """The teacher in float32 with the attention of some layers replaced; new parameters are initialized on the CPU."""
    from sympow.hf import swap_attention

    student = load_causal_model(teacher, torch.device("cpu"), torch.float32)
    swap_attention(student, **_arguments(swap))
    return student.to(device).eval()


def _arguments(swap: SwapConfig) -> dict[str, Any]:
    """The arguments of `swap_attention`."""
    return {
        "power": swap.power,
        "layers": swap.chosen_layers(),
        "gating": swap.gating,
        "rotary": None if swap.rotary == "auto" else swap.rotary,
        "initial_gate": swap.initial_gate,
    }


def add_adapters(student: Any, rank: int, new: set[str], seed: int) -> tuple[Any, list[nn.Parameter]]:
    """Adds LoRA adapters to a student's linear layers in place, for stages 2 and 3.

    Gates and rotations are new parameters and are trained directly.

    Args:
        rank: rank of the adapters.
        new: names of parameters that the teacher does not have.
        seed: seed of the adapters' initial values.

    Returns:
        a model of peft, whose `merge_and_unload` returns the student, and the parameters to train.
    """
    peft = require("peft", "lora")
    # Modules that hold new parameters, such as the projection of gates.
    own = sorted({name.rpartition(".")[0] for name in new})
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=own or None, bias="none"
    )
    trained = [parameter for name, parameter in student.named_parameters() if name in new]
    adapted = peft.get_peft_model(student, config)
    return adapted, [x for name, x in adapted.named_parameters() if ".lora_" in name] + trained


def cast_weights(student: Any, dtype: torch.dtype) -> Any:
    """Casts a student's parameters in place, except for gates and rotations, whose errors accumulate over a text."""
    from sympow.hf import attention_modules, swapped_layers

    attention = attention_modules(student)
    parts = [attention[n].get_submodule(part) for n in swapped_layers(student) for part in ("gate", "rotation")]
    exact = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in student.parameters():
        if id(parameter) not in exact:
            parameter.data = parameter.data.to(dtype)
    return student


def features(model: Any, inputs: Tensor) -> Tensor:
    """The last hidden states (b, t, width), which the output embedding is applied to, for token ids (b, t)."""
    hidden: Tensor = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    return hidden


def output_weight(model: Any) -> Tensor:
    """The output embedding, (vocabulary, width)."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def decoder_layers(model: Any) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Each decoder layer and its attention module, by layer index."""
    from sympow.hf import attention_modules

    names = {module: name for name, module in model.named_modules()}
    found = {}
    for number, attention in attention_modules(model).items():
        parent = names[attention].rpartition(".")[0]
        found[number] = model.get_submodule(parent), attention
    return found


@torch.no_grad()
def check_teacher(model: Any, source: Path | str) -> None:
    """Refuses a teacher that is converted already, or whose logits are not features times the output embedding."""
    from sympow.hf import swapped_layers

    if swapped_layers(model):
        raise ArgumentError("teacher", f"must have softmax attention, and layers of {source} are converted already")
    device = output_weight(model).device
    ids = torch.arange(8, device=device).remainder(model.config.vocab_size).unsqueeze(0)
    ours = features(model, ids) @ output_weight(model).mT
    logits = model(input_ids=ids, use_cache=False).logits
    scale = logits.abs().max()
    # Far above rounding in bfloat16, far below the effect of a bias, a scale or a cap on logits.
    if ours.shape != logits.shape or (ours - logits).abs().max() > 0.02 * scale:
        raise ArgumentError(
            "teacher",
            f"must compute logits as features times its output embedding alone, and {type(model).__name__} of "
            f"{source} does not (a bias, a scale or a cap on logits)",
        )


def check_can_swap(teacher: Any, swap: SwapConfig) -> None:
    """Refuses what `swap_attention` would refuse, without a second copy of the model."""
    from sympow.hf.swap import swapping

    with warnings.catch_warnings():
        # The swap itself will warn of dropout.
        warnings.simplefilter("ignore")
        swapping.check_swap(teacher, **_arguments(swap))


def most_positions(model: Any) -> int | None:
    """The most tokens of a sequence that a model can take; None: any number, since it has a rotary embedding."""
    from sympow.hf import attention_modules
    from sympow.hf.swap.attention_parts import read_attention

    number, attention = next(iter(attention_modules(model).items()))
    if read_attention(model, number, attention)["rates"] is not None:
        return None
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def check_contexts(config: ConvertConfig, positions: int | None) -> None:
    """Refuses training contexts that are longer than the sequences that the teacher can take."""
    contexts = {"context": config.text.context}
    if config.recipe.extend_tokens:
        contexts["extend_context"] = config.extended_context
    for name, context in contexts.items():
        if positions is not None:
            check_at_most(name, context, positions, "the positions that the teacher has embeddings of")


def check_tokens(model: Any, source: Path | str, dataset: TokenDataset) -> str | None:
    """Refuses data whose ids are not those of the teacher's tokenizer, or whose documents begin with another token.

    Returns:
        a note if the teacher has no tokenizer to compare with.
    """
    from sympow.hf.model.conversion import ids_before_text

    known = output_weight(model).shape[0]
    if dataset.vocab_size > known:
        raise ArgumentError(
            "data",
            f"must have the teacher's token ids, below {known:,}; {dataset.name} has a vocabulary of "
            f"{dataset.vocab_size:,}. {_advice(source)}",
        )
    path = Path(source)
    if path.exists() and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return f"{source} has no tokenizer: whether {dataset.name} has its token ids was not checked"
    theirs = load_without_code(require("transformers", "hf").AutoTokenizer, source)
    ours = dataset.load_tokenizer()
    text = ours.decode(dataset.read(0, 0, min(SAMPLE_TOKENS, int(dataset.lengths[0]))))
    expected = list(theirs(text, add_special_tokens=False)["input_ids"])
    found = ours.encode(text).tolist()
    if found != expected:
        place = next(at for at, (one, other) in enumerate(zip_longest(found, expected)) if one != other)
        raise ArgumentError(
            "data",
            f"must be tokenized by the teacher's tokenizer, and {dataset.name} is not: the text of its first "
            f"document becomes {found[place : place + 4]} from token {place} on, and with the tokenizer of {source} "
            f"{expected[place : place + 4]}. {_advice(source)}",
        )
    # The last of them, such as BOS.
    first = next(reversed(ids_before_text(theirs)), dataset.boundary)
    if first != dataset.boundary:
        token = theirs.convert_ids_to_tokens(first)
        raise ArgumentError(
            "data",
            f"must begin documents with the token that the teacher begins texts with, {token!r} ({first}); "
            f"{dataset.name} begins them with {dataset.boundary}. {_advice(source)} --boundary-token '{token}'",
        )
    return None


def _advice(source: Path | str) -> str:
    """A sentence that says how to prepare data for a teacher."""
    path = Path(source)
    file = str(path / "tokenizer.json") if path.exists() else f'"$(hf download -q {source} tokenizer.json)"'
    return f"Prepare it with the teacher's tokenizer: sympow data prepare … --tokenizer {file}"
