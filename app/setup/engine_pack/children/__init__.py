"""Child processes of an installation: how they are run, and what two of them do."""
