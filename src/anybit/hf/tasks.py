"""Zero-shot tasks, run by EleutherAI's lm-eval (the extra ``eval``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.errors import OptionError, one_line
from anybit.hf.loading import Loaded

# Sequences at once.
_ROWS = 16


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of right answers. metric: lm-eval's name of it.  error: its standard error, None of one question.
    questions: how many.
    """

    task: str
    metric: str
    value: float
    error: float | None
    questions: int


def accuracies(loaded: Loaded, tasks: Sequence[str], limit: int | None = None) -> list[Accuracy]:
    """Run tasks without examples, by lm-eval's names; NAME.yaml is a task of that name in a file.

    limit: of questions of each task.  Of several metrics a task's accuracy by length of the answer comes first.
    Raises OptionError without lm-eval, or for a task that it does not know, cannot load, or has no accuracy for.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise OptionError(f"--tasks runs tasks by lm-eval ({error}): pip install 'anybit[eval]'") from None
    files = [Path(task) for task in tasks if task.endswith(".yaml")]
    if missing := next((file for file in files if not file.is_file()), None):
        raise OptionError(f"--tasks {missing}: there is no such file")
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None)
    names = [Path(task).stem if task.endswith(".yaml") else task for task in tasks]
    if unknown := next((name for name in names if not manager.match_tasks([name])), None):
        raise OptionError(f"--tasks {unknown}: lm-eval knows no such task; lm-eval ls tasks shows all")
    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=_ROWS)
    try:
        found = simple_evaluate(model, tasks=names, num_fewshot=0, limit=limit, task_manager=manager, log_samples=False)
    except Exception as error:  # data sets fail to load in many ways
        raise OptionError(f"lm-eval cannot run {', '.join(names)}: {one_line(error)}") from error
    # Groups without an accuracy of their own have no metric, whose names are "acc,none".
    return [_accuracy(task, found) for task, result in found["results"].items() if any("," in key for key in result)]


def _accuracy(task: str, found: dict[str, dict[str, dict[str, Any]]]) -> Accuracy:
    result = found["results"][task]
    for metric in ("acc_norm", "acc", "exact_match"):
        key = next((key for key in result if key.partition(",")[0] == metric), None)
        if key is not None:
            count = found.get("n-samples", {}).get(task, {}).get("effective", 0)
            error = result[key.replace(metric, f"{metric}_stderr", 1)]
            return Accuracy(task, metric, float(result[key]), None if error == "N/A" else float(error), int(count))
    raise OptionError(f"--tasks {task}: lm-eval gives it no accuracy, but {', '.join(sorted(result))}")
