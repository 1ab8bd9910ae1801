"""`aqnpipe init`: a folder for studies, with the shipped ones to start from; the workflow stays in the package."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.errors import StorageError
from aqnpipe.shipped import SHIPPED

_SNAKEFILE = '''"""The workflow of the installed aqnpipe. Studies are in config/, settings of machines in profiles/."""

from aqnpipe.shipped import SNAKEFILE


include: str(SNAKEFILE)


# Snakemake takes no default target from an included file.
workflow.default_target = "all"
'''
_NO_COPIES = shutil.ignore_patterns("README.md", "__pycache__")


def init(folder: Annotated[Path, typer.Argument(help="new or empty folder")] = Path()) -> None:
    """Make a folder for studies: the shipped studies, their arms, and profiles for clusters."""
    make_study_folder(folder)
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    typer.echo(f"{folder}: studies and arms in config/, settings of machines in profiles/")
    typer.echo(f"next: {enter}aqnpipe run (the default study), or snakemake --configfile config/smoke.yaml")


def make_study_folder(folder: Path) -> None:
    """Write what a study needs into `folder`, completely or not at all. Raises StorageError if it is not empty."""
    try:
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if found:
            listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise StorageError(f"{folder}: found {listed}, expected a new or an empty folder")
        _write(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def _write(folder: Path) -> None:
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=folder, prefix=".init-"))
    try:
        for name in ("config", "profiles"):
            shutil.copytree(SHIPPED / name, staged / name, ignore=_NO_COPIES)
        (staged / "Snakefile").write_text(_SNAKEFILE, encoding="utf-8")
        for profile in sorted(path.name for path in (staged / "profiles").iterdir() if path.name != "default"):
            # Snakemake looks for a profile by its name in the working directory.
            (staged / profile).symlink_to(Path("profiles", profile))
        for path in sorted(staged.iterdir()):
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(staged)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
