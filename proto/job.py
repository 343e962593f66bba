"""The job as it travels, and as the code reads it: `messages.JobDescription` <-> `settings.JobTerms`."""

from __future__ import annotations

from ..common.configuration import from_text, to_text
from ..settings import JobSettings, JobTerms
from .messages import JobDescription
from .refusal import Reason, refused


def job_message(terms: JobTerms) -> JobDescription:
    """The message, made of the options that are declared as the job's."""
    return JobDescription(id=terms.id, settings={**to_text(terms, JobSettings), "work": terms.work})


def job_terms(message: JobDescription) -> JobTerms:
    """Return the terms in a message.

    Raises:
        Refused: it does not name the work, or a value is none of its option.
    """
    work = message.settings.get("work", "")
    try:
        if not work:
            raise ValueError("work: expected a kind of work, got none")
        return from_text(JobTerms, message.settings, id=message.id, work=work)
    except ValueError as error:
        raise refused(
            Reason.MALFORMED,
            field="job",
            limit="settings that this release knows",
            value=str(error),
            remedy="install the same release of gradwire on both sides",
        ) from None
