"""A worker inside a user's own script: the script keeps its loop, the server its part of the step.

    import gradwire

    with gradwire.connect() as job:
        model, optimizer = job.attach(model, optimizer)
        for epoch in job.epochs():
            for x, y in job.batches(dataset):
                loss = loss_of(model(x), y)
                job.log(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

docs/scripts.md has what works in such a loop, and what it takes to get there from a plain script.
"""

from .job import Job, connect
from .turn import ScriptError

__all__ = ["Job", "ScriptError", "connect"]
