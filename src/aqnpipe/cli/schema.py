"""`aqnpipe schema`: the JSON schema of study files."""

import typer

from aqnpipe.config.schema import study_schema


def schema() -> None:
    """Print the JSON schema of study files, the content of config/schema.json."""
    typer.echo(study_schema(), nl=False)
