"""Workloads: what the workers train, and how the name of one becomes a `Task`.

    task = load("digits:model=cnn")             # a built-in one
    task = load("my_tasks:spirals:points=500")  # your own function, from a module that Python can import

docs/how-to/tasks.md says what a task must keep to, with a complete example. Importing this package does not import
torch; loading a task does.
"""

from .loading import check_task, load, load_allowed
from .task import Task, TaskError, TaskSpecError

__all__ = ["Task", "TaskError", "TaskSpecError", "check_task", "load", "load_allowed"]
