"""Tasks: the workloads that workers train, and how a spec becomes a `Task`.

    task = load("digits:model=cnn")             # a built-in task
    task = load("my_tasks:spirals:points=500")  # your own function, from a module that Python can import

docs/how-to/tasks.md has the rules for tasks, with a complete example. Importing this package does not import
torch; loading a task does. Authors of tasks find the public names in `gradwire`.
"""

from ..training.splits import parse_split
from .loading import check_task, load, load_allowed
from .loading import load as load_task
from .task import Task, TaskError, TaskSpecError

__all__ = [
    "Task",
    "TaskError",
    "TaskSpecError",
    "check_task",
    "load",
    "load_allowed",
    "load_task",
    "parse_split",
]
