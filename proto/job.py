"""Conversion of the job between `messages.JobDescription` on the wire and `settings.JobTerms` in the code."""

from __future__ import annotations

from ..common.configuration import from_text, to_text
from ..settings import JobSettings, JobTerms
from .messages import JobDescription
from .refusal import Reason, refused


def job_message(terms: JobTerms) -> JobDescription:
    """Return the message that describes a job: its id, its kind of work, and its options as text."""
    return JobDescription(id=terms.id, settings={**to_text(terms, JobSettings), "work": terms.work})


def job_terms(message: JobDescription) -> JobTerms:
    """Return the job's settings from a message.

    Raises:
        Refused: MALFORMED, if the message names no kind of work or an option has an invalid value.
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
