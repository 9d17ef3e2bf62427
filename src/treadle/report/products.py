"""The products of the stages, as text."""

from treadle.graph.core.signature import StepGraph
from treadle.graph.text.printing import show
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.loop.printing import show_call, show_kernel, show_program
from treadle.loop.program import Program
from treadle.passes.memory.decisions import Decision, folded
from treadle.runtime.store.artifact import Artifact

Product = StepGraph | Program | KernelPlan | Artifact | tuple[Decision, ...]
"""What a stage makes."""


def size_of(product: Product) -> str:
    """How large a product is, in words; nothing for a table of decisions."""
    match product:
        case StepGraph():
            return f"{len(product.graph.nodes)} nodes"
        case Program():
            return f"{len(product.steps)} steps"
        case KernelPlan():
            kernels = sum(isinstance(step, Kernel) for step in product.steps)
            return f"{kernels} kernels, {len(product.steps) - kernels} calls"
        case Artifact():
            return f"{sum(len(source.text.splitlines()) for source in product.all_sources)} lines"
        case _:
            return ""


def text_of(product: Product) -> str:
    """A product as a person reads it."""
    match product:
        case StepGraph():
            return show(product, exact=True)
        case Program():
            return show_program(product)
        case KernelPlan():
            parts = [
                show_kernel(s) if isinstance(s, Kernel) else show_call(s) for s in product.steps
            ]
            return "\n\n".join(parts)
        case Artifact():
            return "\n\n".join(source.text for source in product.all_sources)
        case _:
            return "\n".join(folded(product))
