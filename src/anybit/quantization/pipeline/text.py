"""The text to calibrate on, as sequences of token ids."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.errors import OptionError, TextError


def tokenized(
    text: str, tokenizer: Callable[..., object], length: int = 512, tokens: int | None = None
) -> list[Tensor]:
    """The first ``tokens`` tokens of a text as sequences of ``length``, the last one shorter: int64 [length] each."""
    ids: list[int] = tokenizer(text).input_ids  # type: ignore[attr-defined]
    ids = ids[:tokens]
    return [torch.tensor(ids[i : i + length]) for i in range(0, len(ids), length)]


def read_text(path: Path | str) -> str:
    """Read a text for calibration or evaluation. Raises TextError if it is missing, empty or not UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise TextError(f"text {path} is not UTF-8 ({byte}): save it in UTF-8") from None
    except OSError as error:
        raise TextError(f"text {path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise TextError(f"text {path} is empty")
    if "\0" in text:
        raise TextError(f"text {path} holds zero bytes, as UTF-16 does: save it in UTF-8")
    return text


def read_sequences(path: Path, vocabulary: int) -> list[Tensor]:
    """Token ids from a JSON file: a list of lists of any lengths. Raises TextError, with the place, otherwise."""
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise TextError(f"{path} must hold a list of lists of token ids")
    for i, sequence in enumerate(found):
        ids = sequence if isinstance(sequence, list) else [sequence]
        wrong = [item for item in ids if type(item) is not int or not 0 <= item < vocabulary]
        if wrong or not isinstance(sequence, list):
            raise TextError(
                f"{path}: sequence {i} must be a list of token ids from 0 to {vocabulary - 1}, and holds "
                f"{json.dumps((wrong or ids)[0])}"
            )
    return [torch.tensor(sequence, dtype=torch.int64) for sequence in found]


def checked_sequences(found: Any, vocabulary: int) -> list[Tensor]:
    """Token ids from the option ``sequences``. Raises OptionError for anything but lists of token ids."""
    sequences = []
    for i, sequence in enumerate(found if hasattr(found, "__iter__") else [found]):
        try:
            ids = torch.as_tensor(sequence)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.tensor(0)
        whole = ids.ndim == 1 and not (ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool))
        if not whole or bool(((ids < 0) | (ids >= vocabulary)).any()):
            raise OptionError(
                f"option sequences must be lists of token ids from 0 to {vocabulary - 1}; sequence {i} is not one"
            )
        sequences.append(ids.to(torch.int64))
    return sequences
