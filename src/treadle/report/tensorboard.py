"""The figures of a compiled step in TensorBoard."""

from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from treadle.report.explain import explain
from treadle.report.step_report import StepReport
from treadle.report.summary import summary_of
from treadle.util.errors import TreadleError, not_installed
from treadle.util.files import make_folder


class Writer(Protocol):
    """What is asked of ``torch.utils.tensorboard.SummaryWriter``, or of what stands for it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object:
        """A number."""
        ...

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> object:
        """A text in Markdown."""
        ...


def write_tensorboard(report: StepReport, target: str | Path | Writer, at: int | None) -> None:
    """Each number of ``summary`` as a scalar, and the texts of ``explain`` and ``recompiles``, for
    the global step ``at``. ``target``: a writer, or the folder of one that is made and closed."""
    if not isinstance(target, str | Path):
        if not hasattr(target, "add_scalar"):
            raise TreadleError(
                f"{target!r} is neither a folder nor a SummaryWriter",
                code="TR-001",
                remedy="step.to_tensorboard(path), or a writer with add_scalar and add_text",
            )
        _write(report, target, at)
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    make_folder(Path(target))
    with SummaryWriter(str(target)) as writer:
        _write(report, writer, at)


def _write(report: StepReport, writer: Writer, at: int | None) -> None:
    summary = summary_of(report)
    for name, value in asdict(summary).items():
        if isinstance(value, int | float):  # what is not measured is None
            writer.add_scalar(f"{summary.name}/{name}", float(value), at)
    for stage, seconds in summary.stages.items():
        writer.add_scalar(f"{summary.name}/stages/{stage}", seconds, at)
    reasons = summary.recompiles
    writer.add_scalar(f"{summary.name}/recompiles", len(reasons), at)
    writer.add_text(f"{summary.name}/explain", _verbatim(explain(report)), at)
    writer.add_text(f"{summary.name}/recompiles", _verbatim("\n".join(reasons) or "none"), at)


def _verbatim(text: str) -> str:
    """In Markdown: lines as they are."""
    return "\n".join(f"    {line}" for line in text.splitlines())
